"""CPU devices that each have one fault."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from kvtide.device import CPUDevice, Job, Phases, Step

T = TypeVar("T")


class FakeDevice:
    """A CPU device that tests can break."""

    name = "fake"

    def __init__(self) -> None:
        self._cpu = CPUDevice(lanes=2)
        self.torch_device = self._cpu.torch_device
        self.chunk_bytes, self.move_bytes = self._cpu.chunk_bytes, self._cpu.move_bytes
        self.elements = self._cpu.elements
        self.slabs: list[torch.Tensor] = []
        self.closed = False

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return self._cpu.allocate(size_bytes)

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        self.slabs.append(self._cpu.allocate_host(size_bytes))
        return self.slabs[-1]

    def upload(self, index: torch.Tensor) -> torch.Tensor:
        return self._cpu.upload(index)

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        return self._cpu.submit(phases, staging_bytes=staging_bytes, at_once=at_once)

    def close(self) -> None:
        self.closed = True
        self._cpu.close()


class FlippingDevice(FakeDevice):
    """Flips a bit of the first byte that a job moves to the host, in the copy or after it."""

    def __init__(self, *, before_it_is_sealed: bool) -> None:
        super().__init__()
        self._early = before_it_is_sealed

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        def flipping() -> Iterable[Sequence[Step[T]]]:
            for phase in phases():
                yield [self._flip(phase[0]), *phase[1:]] if phase[0].issue else phase

        return self._cpu.submit(flipping, staging_bytes=staging_bytes, at_once=at_once)

    def _flip(self, step: Step[T]) -> Step[T]:
        def issue(staging: torch.Tensor | None) -> None:
            assert step.issue is not None
            # Through staging, bytes are sealed in a later step than they are copied.
            step.issue(torch.empty_like(self.slabs[-1]))
            self.slabs[-1][0] ^= 1

        def finish() -> T:
            result = step.finish()
            self.slabs[-1][0] ^= 1
            return result

        return replace(step, issue=issue) if self._early else replace(step, finish=finish)


class BreakingDevice(FakeDevice):
    """If `breaks_at` is a number, restores fail at that step of their writes."""

    def __init__(self, breaks_at: int | None = None) -> None:
        super().__init__()
        self.breaks_at = breaks_at

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        def breaking() -> Iterable[Sequence[Step[T]]]:
            for number, phase in enumerate(phases()):
                yield self._broken(phase) if number == 1 else phase

        return self._cpu.submit(breaking, staging_bytes=staging_bytes, at_once=at_once)

    def _broken(self, phase: Sequence[Step[T]]) -> Sequence[Step[T]]:
        def fail(staging: torch.Tensor | None) -> None:
            raise OSError("the link is down")

        step = self.breaks_at
        return phase if step is None else [*phase[:step], replace(phase[step], issue=fail)]


class GatedDevice(FakeDevice):
    """Its jobs stop before their last phase until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_there = threading.Event(), threading.Event()
        self.gate.set()

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        def gated() -> Iterable[Sequence[Step[T]]]:
            for phase in phases():
                if phase[0].issue is not None:
                    self.is_there.set()
                    self.gate.wait()
                yield phase

        return self._cpu.submit(gated, staging_bytes=staging_bytes, at_once=at_once)


class FullDevice(FakeDevice):
    """Accepts no job."""

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        raise RuntimeError("the queue is full\nand more that nobody needs")


class LateDevice(FakeDevice):
    """Its jobs fail, which shows when somebody waits for them."""

    def submit(
        self, phases: Phases[T], *, staging_bytes: int = 0, at_once: bool = False
    ) -> Job[list[T]]:
        def failing() -> Iterable[Sequence[Step[T]]]:
            raise OSError("the link is down")

        return self._cpu.submit(failing, staging_bytes=staging_bytes, at_once=at_once)


class UnpinnedDevice(FakeDevice):
    """Can't pin memory, and warns as an accelerator does."""

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        warnings.warn("64 bytes can't be pinned; raise ulimit -l", RuntimeWarning, stacklevel=2)
        return super().allocate_host(size_bytes)


class DirtyDevice(FakeDevice):
    """Allocates memory that isn't zeroed."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        memory = super().allocate(size_bytes)
        memory[:3] = 1
        return memory


class PoorDevice(FakeDevice):
    """Can allocate neither device memory nor host memory."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no device memory")

    def allocate_host(self, size_bytes: int) -> torch.Tensor:
        raise MemoryError
