"""Installs the device, and sets each test's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import pytest
import simnpu

NPU = simnpu.install("npu", devices=2)

THREAD_DELAY_US = 200


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its seed."""

    schedule: simnpu.Schedule
    seed: int = 0

    def set(self) -> None:
        """Sets the schedule; pending operations run first."""
        simnpu.set_schedule(self.schedule, seed=self.seed, delay_us=THREAD_DELAY_US)

    def __str__(self) -> str:
        return f"random{self.seed}" if self.schedule == "random" else self.schedule


LAZY, EAGER, THREAD = Plan("lazy"), Plan("eager"), Plan("thread")
PLANS = (LAZY, EAGER, *(Plan("random", seed) for seed in range(3)), THREAD)


@pytest.fixture(params=PLANS, ids=str)
def schedule(request: pytest.FixtureRequest) -> Plan:
    """Runs the test once in each schedule."""
    plan: Plan = request.param
    plan.set()
    return plan


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test must not end with pending work or with a violation that it didn't read."""
    yield
    pending, violations = simnpu.pending(), simnpu.take_violations()
    simnpu.reset()
    assert (0, []) == (pending, violations + simnpu.take_violations())
