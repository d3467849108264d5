"""kvtide's devices pass the kit: the CPU, and the simulated accelerator in all its schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtide.conformance import DeviceTests
from kvtide.device import AcceleratorDevice, CPUDevice, Device
from support.lazy_device import LazyDevice
from support.simulated import SCHEDULES, lazy_accelerator, simulated


class OnTheHost(DeviceTests):
    """Bytes are there to be looked at."""

    def read_raw(self, tensor: torch.Tensor) -> bytes:
        """The tensor's own memory."""
        data: bytes = tensor.numpy().tobytes()
        return data

    def write_raw(self, tensor: torch.Tensor, data: bytes) -> None:
        """The same."""
        tensor.numpy().data[:] = data


class TestCPU(OnTheHost):
    """Copies in threads."""

    def make_device(self) -> Device:
        """Two lanes."""
        return CPUDevice(lanes=2)


class TestOneLane(OnTheHost):
    """Copies in the queue's thread alone."""

    def make_device(self) -> Device:
        """One lane."""
        return CPUDevice(lanes=1)


class TestLazyDevice(OnTheHost):
    """The tests' own device, on which nothing happens before it is waited for."""

    def make_device(self) -> Device:
        """With staging, and steps in any order."""
        return LazyDevice(3)


class OnAnAccelerator(DeviceTests):
    """Its memory is read by copies that are waited for."""

    @pytest.fixture(autouse=True, params=SCHEDULES)
    def schedule(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Each of them; a mistake in waiting is one at the end, at the latest."""
        with simulated(request.param):
            yield

    def read_raw(self, tensor: torch.Tensor) -> bytes:
        """By way of the host."""
        torch.accelerator.synchronize()
        data: bytes = tensor.cpu().numpy().tobytes()
        return data

    def write_raw(self, tensor: torch.Tensor, data: bytes) -> None:
        """The same way."""
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.accelerator.synchronize()


class TestAccelerator(OnAnAccelerator):
    """With threads of its own."""

    def make_device(self) -> Device:
        """The first of two."""
        return AcceleratorDevice("npu")


class TestLazyAccelerator(OnAnAccelerator):
    """Whose jobs begin when somebody waits for one."""

    def make_device(self) -> Device:
        """The second of two, named by its number."""
        return lazy_accelerator("npu:0")
