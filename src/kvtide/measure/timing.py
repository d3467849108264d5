"""Measures wall time and processor time of operations that take turns.

Operations take turns in one process, so a machine that slows down slows all of them. Each figure is
a median over rounds. Compare figures of the same measurement as ratios; never compare figures of
two measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar, final

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Operation = Callable[[], object]


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """The time that an operation took. `cpu_seconds` is the processor time of all threads."""

    seconds: float
    cpu_seconds: float


def timed(call: Callable[[], T]) -> tuple[T, Timing]:
    """The call's result and its time."""
    cpu_start, start = time.process_time(), time.perf_counter()
    result = call()
    end, cpu_end = time.perf_counter(), time.process_time()
    return result, Timing(end - start, cpu_end - cpu_start)


def median_of(timings: Iterable[Timing]) -> Timing:
    """The medians of both times."""
    found = [*timings]
    return Timing(
        statistics.median(timing.seconds for timing in found),
        statistics.median(timing.cpu_seconds for timing in found),
    )


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
