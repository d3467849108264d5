"""Describes this place: the device, the versions, the memory at both ends of a copy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import final

import torch

from kvtide import __version__
from kvtide.device import Device, open_device
from kvtide.doctor.finding import Finding
from kvtide.errors import UsageError, first_line
from kvtide.machine import machine_name

# More than common limits of locked memory, which are 64 KiB or 8 MiB.
_HOST_SAMPLE_BYTES = 16 << 20


@final
@dataclass(frozen=True, slots=True)
class Opened:
    """A device as torch knows it, and as kvtide opened it (`device` is None if that failed)."""

    name: str
    torch_device: torch.device
    device: Device | None
    finding: Finding

    @property
    def is_cpu(self) -> bool:
        """Whether both ends of a copy are host memory."""
        return self.torch_device.type == "cpu"

    def synchronize(self) -> None:
        """Waits for all work of the device; raises the device's errors."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.torch_device)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        """Host memory as kvtide allocates it for this device: uint8 [size_bytes]."""
        if self.device is not None:
            return self.device.allocate_host(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=not self.is_cpu)


@final
@dataclass(frozen=True, slots=True)
class Here:
    """Facts about the device; None if torch doesn't tell."""

    title: str | None
    index: int | None
    free_bytes: int | None
    total_bytes: int | None
    pinned: bool
    host_reason: str | None
    """Why host memory isn't suited for copies, with a remedy; None if it is."""
    torch_version: str = torch.__version__
    kvtide_version: str = __version__


def default_device() -> str:
    """The accelerator that torch finds here, otherwise `cpu`."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if here is None else here.type


def open_for_checkup(name: str) -> Opened:
    """Opens the device of that name. Raises UsageError if torch has no such device here."""
    what = "kvtide opens the device"
    try:
        device = open_device(name)
    except UsageError:
        raise
    except Exception as error:  # a device's driver may raise anything
        finding = Finding(what, first_line(error), "nothing can be moved on this device")
        return Opened(name, torch.device(name), None, finding)
    return Opened(name, device.torch_device, device, Finding(what, None))


def look_around(opened: Opened) -> Here:
    """Asks torch, and allocates some host memory to see whether it is pinned."""
    free_bytes, total_bytes = _memory_of(opened.torch_device)
    pinned, host_reason = _look_at_host_memory(opened)
    return Here(
        _title_of(opened.torch_device),
        opened.torch_device.index,
        free_bytes,
        total_bytes,
        pinned,
        host_reason,
    )


def _title_of(device: torch.device) -> str | None:
    if device.type == "cpu":
        return machine_name()
    try:
        return str(torch.get_device_module(device).get_device_name(device.index))
    except Exception:  # not every backend has this function, and it is only a name
        return None


def _memory_of(device: torch.device) -> tuple[int | None, int | None]:
    """(free, total) bytes of the device's memory; torch tells since 2.10."""
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if device.type == "cpu" or ask is None:
        return None, None
    try:
        free_bytes, total_bytes = ask(device)
    except Exception:  # not every backend has this function
        return None, None
    return int(free_bytes), int(total_bytes)


def _look_at_host_memory(opened: Opened) -> tuple[bool, str | None]:
    """(pinned, why it isn't suited for copies). A device that can't pin memory warns."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            pinned = opened.allocate_host(_HOST_SAMPLE_BYTES).is_pinned()
        except Exception as error:  # a device's driver may raise anything
            return False, first_line(error)
    complaints = [
        str(warning.message) for warning in said if issubclass(warning.category, RuntimeWarning)
    ]
    if complaints:
        return pinned, complaints[0].strip().partition("\n")[0]
    if pinned or opened.is_cpu:
        return pinned, None
    return False, "allocate_host gave pageable memory without a reason"
