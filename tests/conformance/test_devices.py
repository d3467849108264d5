"""kvtide's devices pass the kit: the CPU, and the simulated accelerator in every schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtide.conformance import DeviceTests
from kvtide.device import AcceleratorDevice, CPUDevice, Device
from support.lazy_device import LazyDevice
from support.simulated import SCHEDULES, lazy_accelerator, simulated


class OnTheHost(DeviceTests):
    """The device's memory is host memory, so the tests read it directly."""

    def read_raw(self, tensor: torch.Tensor) -> bytes:
        """Returns the tensor's bytes."""
        data: bytes = tensor.numpy().tobytes()
        return data

    def write_raw(self, tensor: torch.Tensor, data: bytes) -> None:
        """Writes the tensor's bytes."""
        tensor.numpy().data[:] = data


class TestCPU(OnTheHost):
    """The CPU copies in the queue's thread and another."""

    def make_device(self) -> Device:
        """Makes a device of two lanes."""
        return CPUDevice(lanes=2)


class TestOneLane(OnTheHost):
    """The CPU copies in the queue's thread only."""

    def make_device(self) -> Device:
        """Makes a device of one lane."""
        return CPUDevice(lanes=1)


class TestLazyDevice(OnTheHost):
    """A device of the tests that does nothing before somebody waits for it."""

    def make_device(self) -> Device:
        """Makes a device with staging, which takes steps in a random order."""
        return LazyDevice(3)


class OnAnAccelerator(DeviceTests):
    """The tests read the device's memory by copies, and wait for them."""

    @pytest.fixture(autouse=True, params=SCHEDULES)
    def schedule(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Runs the tests in each schedule; at the end it raises every violation not yet raised."""
        with simulated(request.param):
            yield

    def read_raw(self, tensor: torch.Tensor) -> bytes:
        """Copies the tensor to the host and returns its bytes."""
        torch.accelerator.synchronize()
        data: bytes = tensor.cpu().numpy().tobytes()
        return data

    def write_raw(self, tensor: torch.Tensor, data: bytes) -> None:
        """Copies the bytes to the device."""
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.accelerator.synchronize()


class TestAccelerator(OnAnAccelerator):
    """The simulated accelerator with its own threads."""

    def make_device(self) -> Device:
        """Makes the first of two devices."""
        return AcceleratorDevice("npu")


class TestLazyAccelerator(OnAnAccelerator):
    """The simulated accelerator, whose jobs begin when somebody waits for one."""

    def make_device(self) -> Device:
        """Makes the second of two devices, which is named by its number."""
        return lazy_accelerator("npu:0")
