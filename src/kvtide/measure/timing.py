"""Time: of the wall and of the processor, of operations that take turns.

All is measured in one run and in turns, so that a machine that slows down does so for all, and each
figure is a median over rounds. Compare figures of one run as ratios, never those of two runs.
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
    """What an operation took; `cpu_seconds` is the processor time of all threads together."""

    seconds: float
    cpu_seconds: float


def timed(call: Callable[[], T]) -> tuple[T, Timing]:
    """The call's result, and what it took."""
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
    """Each operation twice in its turn, the second time measured; medians over the rounds.

    What is measured is the steady state: threads are awake, and the operation before has no threads
    left that spin, as OpenMP's do for milliseconds on a core that the next operation needs.
    """
    found: dict[K, list[Timing]] = {key: [] for key in operations}
    for _ in range(rounds):
        for key, call in operations.items():
            call()
            result, timing = timed(call)
            # What the operation allocated is freed outside of what is timed.
            del result
            found[key].append(timing)
    return {key: median_of(timings) for key, timings in found.items()}
