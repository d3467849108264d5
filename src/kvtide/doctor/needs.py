"""Tries each operation that kvtide needs of a device, and compares its result with the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import torch

from kvtide.device import AcceleratorDevice
from kvtide.doctor.finding import Finding, attempt
from kvtide.doctor.here import Here, Opened
from kvtide.layout.dtypes import dtype_name

# The dtypes of KV. If this version of torch lacks a name, that is a finding, too.
KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")

_SIZE_BYTES = 1 << 20
_UNITS = 512
_UNUSABLE = "kvtide can't use this device"

T = TypeVar("T")
Check = Callable[[], str | None]


def check_needs(opened: Opened, here: Here) -> Iterator[Finding]:
    """Tries each need; gives the findings one by one.

    On the CPU kvtide needs no streams, no events and no asynchronous copies.
    """
    probe = _Probe(opened)
    yield opened.finding
    needs: list[tuple[str, Check, str]] = []
    if not opened.is_cpu:
        needs += [
            ("a separate stream", probe.stream, f"{_UNUSABLE}: copies need one"),
            ("events", probe.events, f"{_UNUSABLE}: it can't tell when a copy is done"),
        ]
    needs.append(("device memory, zeroed", probe.allocation, "Pool.create doesn't work"))
    elements = AcceleratorDevice.elements if opened.device is None else opened.device.elements
    for dtype in elements:
        name = dtype_name(dtype)
        needs += [
            (f"index_select(out=), {name}", _about(probe.select, dtype), "no offload works"),
            (f"index_copy_, {name}", _about(probe.index_copy, dtype), "no restore works"),
        ]
    slower = "copies are slower, and block the thread that starts them"
    if not opened.is_cpu or here.host_reason is not None:
        needs.append(("pinned host memory", lambda: _pinning(here), slower))
    if not opened.is_cpu:
        needs += [
            ("asynchronous copy to the host", probe.copy_out, "no offload works"),
            ("asynchronous copy to the device", probe.copy_in, "no restore works"),
        ]
    for name in KV_DTYPES:
        follows = f"KV in {name} can't be moved; keep it as uint8 on this device"
        needs.append((f"uint8 view of {name}", _about(probe.bytes_view, name), follows))
    for name, check, consequence in needs:
        yield attempt(name, check, settle=opened.synchronize, consequence=consequence)


@final
class _Probe:
    """Each method tries a need: it returns what is wrong, or None, or raises an error."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._where = opened.torch_device
        self._bytes = torch.arange(_SIZE_BYTES // 8, dtype=torch.int64).mul_(-7046029254386353131)
        self._bytes = self._bytes.view(torch.uint8)

    def stream(self) -> str | None:
        """Work on a separate stream has happened once the host has waited for the stream."""
        source = self._bytes.to(self._where)
        stream = torch.Stream(device=self._where)
        target = torch.zeros_like(source)
        self._opened.synchronize()
        with stream:
            target.copy_(source)
        stream.synchronize()
        return self._compare(target)

    def events(self) -> str | None:
        """A stream waits for an event of another stream, and the host waits for an event."""
        source = self._bytes.to(self._where)
        first, second = torch.Stream(device=self._where), torch.Stream(device=self._where)
        between, target = torch.zeros_like(source), torch.zeros_like(source)
        self._opened.synchronize()
        with first:
            between.copy_(source)
            copied = torch.Event(device=self._where)
            copied.record(first)
        second.wait_event(copied)
        with second:
            target.copy_(between)
            ended = second.record_event()
        ended.query()  # may be true or false
        ended.synchronize()
        if not ended.query():
            return "the host waited for an event, but the event says that it hasn't happened"
        return self._compare(target)

    def allocation(self) -> str | None:
        """Device memory is zeroed, as Pool.create needs it."""
        device = self._opened.device
        if device is None:
            memory = torch.zeros(_SIZE_BYTES, dtype=torch.uint8, device=self._where)
        else:
            memory = device.allocate(_SIZE_BYTES)
        count = int(memory.cpu().count_nonzero())
        return f"{count} of {_SIZE_BYTES} bytes aren't zero" if count else None

    def select(self, dtype: torch.dtype) -> str | None:
        """Gathers scattered units into contiguous device memory, as an offload does."""
        units = self._units(dtype)
        index = torch.arange(_UNITS - 1, -1, -3)
        target = torch.zeros_like(units).to(self._where)[: index.numel()]
        torch.index_select(units.to(self._where), 0, index.to(self._where), out=target)
        self._opened.synchronize()
        return _differing(units[index], target)

    def index_copy(self, dtype: torch.dtype) -> str | None:
        """Scatters contiguous units, as a restore does; other units don't change."""
        units = self._units(dtype)
        index = torch.arange(_UNITS - 1, -1, -3)
        target = torch.zeros_like(units)
        expected = target.clone()
        expected[index] = units[: index.numel()]
        target = target.to(self._where)
        target.index_copy_(0, index.to(self._where), units[: index.numel()].to(self._where))
        self._opened.synchronize()
        return _differing(expected, target)

    def copy_in(self) -> str | None:
        """Copies host memory, allocated as the arena does, to the device on a separate stream."""
        source = self._opened.allocate_host(_SIZE_BYTES)
        source.copy_(self._bytes)
        target = torch.zeros_like(source, device=self._where)
        self._opened.synchronize()
        self._copy_beside(source, target)
        return self._compare(target)

    def copy_out(self) -> str | None:
        """Copies device memory to host memory of the arena's kind on a separate stream."""
        source = self._bytes.to(self._where)
        target = self._opened.allocate_host(_SIZE_BYTES)
        self._opened.synchronize()
        self._copy_beside(source, target)
        return self._compare(target)

    def bytes_view(self, name: str) -> str | None:
        """A tensor of that dtype keeps any bytes, NaN payloads included."""
        dtype = getattr(torch, name)
        shape = _SIZE_BYTES // dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype, device=self._where)
        tensor.view(torch.uint8).copy_(self._bytes)
        # And a view of bytes as that dtype, as Pool.create makes it.
        again = tensor.view(torch.uint8).clone().view(dtype)
        self._opened.synchronize()
        return self._compare(again.view(torch.uint8))

    def _copy_beside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        stream = torch.Stream(device=self._where)
        with stream:
            target.copy_(source, non_blocking=True)
            copied = stream.record_event()
        copied.synchronize()

    def _units(self, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.view(dtype).view(_UNITS, -1)

    def _compare(self, found: torch.Tensor) -> str | None:
        return _differing(self._bytes, found)


def _differing(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    wanted, given = _as_bytes(expected), _as_bytes(found.cpu())
    count = int((wanted != given).count_nonzero())
    return f"{count} of {wanted.numel()} bytes differ" if count else None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _pinning(here: Here) -> str | None:
    """What is wrong with host memory, or None."""
    if here.host_reason is None:
        return None
    kind = "pinned, with a warning" if here.pinned else "pageable"
    return f"host memory is {kind}; see the line `host memory`"


def _about(check: Callable[[T], str | None], what: T) -> Check:
    """Binds `check` to an argument now; a lambda in a loop would use the loop's last value."""
    return lambda: check(what)
