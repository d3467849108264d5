"""Devices: where bytes live, and when a copy of them is done."""

from kvtide.device.accelerator import AcceleratorDevice
from kvtide.device.base import Block, Device, Job, Phases, Step, drain
from kvtide.device.cpu import CPUDevice

__all__ = [
    "AcceleratorDevice",
    "Block",
    "CPUDevice",
    "Device",
    "Job",
    "Phases",
    "Step",
    "drain",
    "open_device",
]


def open_device(name: str) -> Device:
    """Opens a device by its name. Raises UsageError if torch doesn't have it here."""
    return CPUDevice() if name == "cpu" else AcceleratorDevice(name)
