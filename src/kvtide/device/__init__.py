"""Where bytes live, and when a copy of them is done."""

from kvtide.device.accelerator import AcceleratorDevice
from kvtide.device.base import Block, Device, Job, Phases, Step
from kvtide.device.cpu import CPUDevice

__all__ = [
    "AcceleratorDevice",
    "Block",
    "CPUDevice",
    "Device",
    "Job",
    "Phases",
    "Step",
    "open_device",
]


def open_device(name: str) -> Device:
    """The device of that name; raises UsageError for one that torch doesn't have here."""
    return CPUDevice() if name == "cpu" else AcceleratorDevice(name)
