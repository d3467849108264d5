"""Measures wall time and processor time of operations that take turns.

Operations take turns in one process, so a machine that slows down slows all of them. Each figure is
a median over rounds, with the quartiles. Compare figures of the same measurement as ratios; never
compare figures of two measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Operation = Callable[[], object]


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """A figure's median over rounds, and its quartiles: half of the rounds were between these."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """`0.95 (0.93…0.97)`."""
        return f"{self.median:.2f} ({self.low:.2f}…{self.high:.2f})"

    def to_json(self, name: str) -> dict[str, Any]:
        """The median under a name, and the quartiles beside it."""
        quartiles = [round(self.low, 3), round(self.high, 3)]
        return {name: round(self.median, 3), f"{name}_quartiles": quartiles}


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """The time that an operation took. `cpu_seconds` is the processor time of all threads.

    `quartiles` has the quartiles of the wall time over the rounds; None for a single call.
    """

    seconds: float
    cpu_seconds: float
    quartiles: tuple[float, float] | None = None

    def relative_to(self, seconds: float) -> Spread:
        """This time as a multiple of another."""
        low, high = self.quartiles or (self.seconds, self.seconds)
        return Spread(self.seconds / seconds, low / seconds, high / seconds)

    def speed(self, amount: float) -> Spread:
        """`amount` divided by this time: another operation's time for a ratio, or bytes."""
        low, high = self.quartiles or (self.seconds, self.seconds)
        return Spread(amount / self.seconds, amount / high, amount / low)


def timed(call: Callable[[], T]) -> tuple[T, Timing]:
    """The call's result and its time."""
    cpu_start, start = time.process_time(), time.perf_counter()
    result = call()
    end, cpu_end = time.perf_counter(), time.process_time()
    return result, Timing(end - start, cpu_end - cpu_start)


def median_of(timings: Iterable[Timing]) -> Timing:
    """The medians of both times, with the quartiles of the first."""
    found = [*timings]
    seconds = [timing.seconds for timing in found]
    low, middle, high = (
        statistics.quantiles(seconds, method="inclusive") if len(found) > 1 else seconds * 3
    )
    cpu_seconds = statistics.median(timing.cpu_seconds for timing in found)
    return Timing(middle, cpu_seconds, (low, high))


def time_in_turns(operations: Mapping[K, Operation], rounds: int) -> dict[K, Timing]:
    """Runs each operation twice in its turn and measures the second; medians over the rounds.

    So the steady state is measured. During the first call sleeping threads wake up, and threads of
    the operation before end their spinning: OpenMP's spin for milliseconds.
    """
    found: dict[K, list[Timing]] = {key: [] for key in operations}
    for _ in range(rounds):
        for key, call in operations.items():
            call()
            result, timing = timed(call)
            # Memory of the result is freed here, outside of the measured time.
            del result
            found[key].append(timing)
    return {key: median_of(timings) for key, timings in found.items()}
