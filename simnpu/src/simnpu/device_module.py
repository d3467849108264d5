"""The module `torch.<name>`, with the functions that code expects of a device's module.

It has the functions of `torch.accelerator` under older names, whatever the device is called.
"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any, TypeAlias, final

import torch
from simnpu import _C

DeviceLike: TypeAlias = torch.device | int | str | None


class Stream(torch.Stream):
    """Makes a new stream of `device`, by default the current device; it is a context manager."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: int) -> Stream:
        """Returns an existing stream if stream_id, device_index and device_type are given."""
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=_device(device), priority=priority)


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventType):
    """Makes a torch.Event of the current device.

    This is no subclass of torch.Event: torch 2.13 refuses subclasses in elapsed_time and
    record_event.
    """

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """`blocking` changes nothing here. Raises RuntimeError for an interprocess event."""
        if interprocess:
            raise RuntimeError("simnpu: events can't be shared between processes")
        return torch.Event(_device(None), enable_timing=enable_timing, blocking=blocking)


@final
class device:  # noqa: N801  # torch.cuda has it under this name
    """A context manager that makes `device` the current device."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *error: object) -> None:
        _C.set_device(self._before)


@final
class stream:  # noqa: N801  # torch.cuda has it under this name
    """A context manager that makes `stream` the current stream; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        return None if self.stream is None else self.stream.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


def _name() -> str:
    return torch._C._get_privateuse1_backend_name()


def _device(which: DeviceLike) -> torch.device:
    """Returns the device with its index."""
    if isinstance(which, int):
        return torch.device(_name(), which)
    found = torch.device(_name()) if which is None else torch.device(which)
    return found if found.index is not None else torch.device(found.type, _C.current_device())


def _index(which: DeviceLike) -> int:
    index = _device(which).index
    assert index is not None
    return index


def init() -> None:
    """Does nothing, since install() has done it."""


def is_available() -> bool:
    """Returns True: the device is simulated."""
    return True


def is_initialized() -> bool:
    """Returns True: install() has initialised the device."""
    return True


def is_bf16_supported() -> bool:
    """Returns True: the device runs the CPU's kernels."""
    return True


def device_count() -> int:
    """Returns how many devices there are."""
    return _C.device_count()


def current_device() -> int:
    """Returns the index of this thread's current device."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Makes `device` this thread's current device."""
    _C.set_device(_index(device))


def get_device_name(device: DeviceLike = None) -> str:
    """Returns the device's name."""
    return f"simnpu {_device(device)}"


def synchronize(device: DeviceLike = None) -> None:
    """Blocks until all streams of `device` are done; raises RuntimeError for violations."""
    torch.accelerator.synchronize(_device(device))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Returns this thread's current stream of `device`."""
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Returns the stream of `device` that is current until another is set."""
    kind = torch.Stream(device=_device(device)).device_type
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    """Makes `stream` this thread's current stream on its device."""
    torch.accelerator.set_stream(stream)


def empty_cache() -> None:
    """Synchronises, as a real allocator does before it gives memory back; there is no cache."""
    torch.accelerator.empty_cache()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Returns free and total bytes of `device`."""
    return torch.accelerator.get_memory_info(_device(device))


def memory_allocated(device: DeviceLike = None) -> int:
    """Returns the bytes in use on `device`; memory whose free is still queued counts."""
    return torch.accelerator.memory_allocated(_device(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Returns the most bytes that were ever in use on `device`."""
    return torch.accelerator.max_memory_allocated(_device(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """Returns the bytes of `device` that were ever handed out."""
    return torch.accelerator.memory_reserved(_device(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Returns the same as memory_reserved: reserved memory isn't given back."""
    return torch.accelerator.max_memory_reserved(_device(device))


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    """Returns the allocator's counters under torch's names."""
    return dict(torch.accelerator.memory_stats(_device(device)))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Sets the peaks to what is in use now."""
    torch.accelerator.reset_peak_memory_stats(_device(device))


def manual_seed(seed: int) -> None:
    """Seeds the CPU's generator, from which the device draws."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """See manual_seed."""
    manual_seed(seed)


def initial_seed() -> int:
    """Returns the seed of the CPU's generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:  # noqa: ARG001
    """Returns the state of the CPU's generator."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:  # noqa: ARG001
    """Sets the state of the CPU's generator."""
    torch.default_generator.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Returns the dtypes that autocast may use."""
    return [torch.float16, torch.bfloat16]


def _lazy_init() -> None:
    init()


def _is_in_bad_fork() -> bool:
    return _C.is_forked()


def make_module(name: str) -> ModuleType:
    """Makes a module `torch.<name>` with all functions of this file."""
    module = ModuleType(f"torch.{name}", __doc__)
    source = vars(sys.modules[__name__])
    wanted = [key for key in source if not key.startswith("_")] + ["_lazy_init", "_is_in_bad_fork"]
    for key in wanted:
        if getattr(source[key], "__module__", None) == __name__:
            setattr(module, key, source[key])
    return module
