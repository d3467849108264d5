"""Where bytes live, and when a copy of them is done."""

from kvtide.device.base import Block, Device, Job
from kvtide.device.cpu import CPUDevice
from kvtide.errors import UsageError

__all__ = ["Block", "CPUDevice", "Device", "Job", "open_device"]


def open_device(name: str) -> Device:
    """The device of that name; raises UsageError for one that kvtide doesn't know."""
    if name != "cpu":
        raise UsageError(f"device {name!r} isn't known; known are: cpu")
    return CPUDevice()
