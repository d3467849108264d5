"""Installs the device, and controls the simulation."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, final

import torch
from torch.utils import backend_registration

try:
    from simnpu import _C
except ImportError as error:
    raise ImportError(
        f"simnpu: its compiled part doesn't load into torch {torch.__version__} ({error}); "
        "it fits only the torch it was built against: pip install --no-build-isolation --force-"
        "reinstall --no-deps simnpu builds it for this one"
    ) from error

from simnpu import device_module, refusals

Schedule = Literal["lazy", "eager", "random", "thread"]
_MOST_DEVICES = 16
_UNNAMED_BACKEND = "privateuseone"
_LIST_OF_REAL_BACKENDS = ("torch_npu",)


@final
@dataclass(frozen=True, slots=True)
class _Installed:
    name: str
    devices: int
    memory_bytes: int
    refuse: str | None


@final
@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since install().

    `queued_kernels` ran when the schedule let them run. `blocking_kernels` had results whose shape
    depends on data, so they waited for their stream; `blocking_names` counts them by operator.
    """

    enqueued: int
    queued_kernels: int
    blocking_kernels: int
    blocking_names: dict[str, int]
    device_bytes: tuple[int, ...]
    device_peak_bytes: tuple[int, ...]
    pinned_bytes: int


_installed: _Installed | None = None


def install(
    name: str = "npu",
    devices: int = 1,
    *,
    memory_bytes: int = 2 << 30,
    schedule: Schedule = "lazy",
    refuse: str | None = "ascend",
    pinned_limit_bytes: int | None = None,
) -> ModuleType:
    """Gives torch a simulated accelerator `name` with `devices` devices; returns `torch.<name>`.

    `memory_bytes` is the size of each device's memory, which is taken from the host as it is
    used. `refuse` names the list of calls that the real device refuses; None refuses nothing.
    `pinned_limit_bytes` limits pinned host memory: pinning more raises RuntimeError, as it does
    where the limit on locked memory is reached.

    The device stays installed until the process ends. A second call with the same arguments only
    sets the schedule and the limit. Raises RuntimeError for a second call with other arguments,
    and if this process has a real device of this kind, since torch has room for only one.
    """
    global _installed
    wanted = _Installed(name, devices, memory_bytes, refuse)
    _check_arguments(wanted)
    if _installed is None:
        _register(wanted)
        _installed = wanted
    elif _installed != wanted:
        raise RuntimeError(f"simnpu: {_installed} is installed already, so {wanted} can't be")
    set_policy(pinned_limit_bytes=pinned_limit_bytes)
    set_schedule(schedule)
    module: ModuleType = getattr(torch, name)
    return module


def _register(wanted: _Installed) -> None:
    _check_place()
    denied = _denied(wanted.refuse)
    _C.install(wanted.devices, wanted.memory_bytes)
    _C.set_refusals(denied)
    _C.skip_directories([_directory_of(torch), str(Path(__file__).parent) + os.sep])
    backend_registration.rename_privateuse1_backend(wanted.name)
    module = device_module.make_module(wanted.name)
    torch._register_device_module(wanted.name, module)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{wanted.name}"] = module
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_C.shutdown)
    os.register_at_fork(
        before=_C.before_fork,
        after_in_parent=lambda: _C.after_fork(False),
        after_in_child=lambda: _C.after_fork(True),
    )


@functools.cache
def _denied(name: str | None) -> list[tuple[str, str, str]]:
    lines = refusals.load(name) if name is not None else ()
    return [(line.op, dtype, line.reason) for line in lines for dtype in line.dtypes]


def _check_arguments(wanted: _Installed) -> None:
    if not 1 <= wanted.devices <= _MOST_DEVICES:
        raise ValueError(f"simnpu: devices is {wanted.devices}, not 1 to {_MOST_DEVICES}")
    if wanted.memory_bytes < 1:
        raise ValueError(f"simnpu: memory_bytes is {wanted.memory_bytes}, not positive")


def _check_place() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    real = [module for module in _LIST_OF_REAL_BACKENDS if _is_loaded_from_file(module)]
    if taken != _UNNAMED_BACKEND or real:
        raise RuntimeError(
            f"simnpu: this process has a device of its own ({', '.join(real) or taken}), and torch "
            "has room for one such backend; run the same code on it, without simnpu"
        )


def _is_loaded_from_file(module: str) -> bool:
    """Tells the real backend, which has a file, from this package's shim, which has none."""
    return getattr(sys.modules.get(module), "__file__", None) is not None


def _directory_of(package: ModuleType) -> str:
    assert package.__file__ is not None
    return str(Path(package.__file__).parent) + os.sep


def set_schedule(schedule: Schedule, *, seed: int = 0, delay_us: int = 500) -> None:
    """Runs all pending operations, then sets when operations run.

    lazy: when somebody waits for them. eager: at once. random: some at each call, drawn from
    `seed`. thread: one after each `delay_us` microseconds, on a thread. Every schedule keeps the
    order within a stream. Violations that the pending operations show are raised at the next
    synchronisation. Raises ValueError for another name.
    """
    _C.set_schedule(schedule, seed, delay_us)


def set_policy(
    *,
    pageable_async: bool = True,
    strict_free: bool = False,
    pinned_limit_bytes: int | None = None,
) -> None:
    """Sets all policies; a policy that isn't given gets its default.

    pageable_async: non_blocking copies of memory that isn't pinned are asynchronous, too, which is
    the worst case. If False, they block, or copy the source at the call.
    strict_free: freeing pinned memory with a pending copy is a violation. If False, the memory is
    kept until the copy has run, as CUDA's allocator does.
    pinned_limit_bytes: how much host memory may be pinned; None sets no limit.
    """
    _C.set_policy(pageable_async, strict_free, pinned_limit_bytes)


def pending() -> int:
    """Returns how many operations are queued, on all streams of all devices."""
    return _C.pending()


def step(count: int = 1) -> None:
    """Runs up to `count` pending operations, each from a random stream."""
    _C.step(count)


def take_violations() -> list[str]:
    """Returns the violations that were found and not raised. They won't be raised any more."""
    return _C.take_violations()


def stats() -> Stats:
    """Returns counters since install()."""
    return Stats(**_C.stats())


def reset() -> None:
    """Runs what is pending, drops violations, and sets the defaults. Call it between tests.

    The defaults are: schedule lazy, the default policy, the deny list of install(), and for this
    thread device 0 and default streams.
    """
    _C.reset()
    if _installed is not None:
        _C.set_refusals(_denied(_installed.refuse))
