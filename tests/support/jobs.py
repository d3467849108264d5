"""Jobs of plain callables, for tests of devices and tickets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtide.device import Device, Job, Step

T = TypeVar("T")


def submit(
    device: Device, *phases: Sequence[Callable[[], T]], at_once: bool = False
) -> Job[list[T]]:
    """Submits a job of these phases, whose items are work for the host only."""

    def make_phases() -> list[list[Step[T]]]:
        return [[Step(item) for item in phase] for phase in phases]

    return device.submit(make_phases, at_once=at_once)
