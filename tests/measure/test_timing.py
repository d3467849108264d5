from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.measure.timing import Spread, Timing, median_of, time_in_turns


class _Time:
    """A clock that only the operations move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * self.now


def test_operations_take_turns_and_only_the_second_call_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They alternate, so that a slow machine slows all alike; a cold start isn't measured."""
    clock = _Time()
    monkeypatch.setattr("kvtide.measure.timing.time", clock)
    seconds = {"a": [9.0, 1.0, 9.0, 3.0, 9.0, 2.0], "b": [9.0, 4.0, 9.0, 4.0, 9.0, 6.0]}
    calls: list[str] = []

    def operation(name: str) -> Callable[[], None]:
        def call() -> None:
            clock.now += seconds[name][calls.count(name)]
            calls.append(name)

        return call

    timings = time_in_turns({("", name): operation(name) for name in seconds}, rounds=3)
    assert ["a", "a", "b", "b"] * 3 == calls
    assert {
        ("", "a"): Timing(2.0, 4.0, (1.5, 2.5)),
        ("", "b"): Timing(4.0, 8.0, (4.0, 5.0)),
    } == timings


@pytest.mark.parametrize(
    ("seconds", "quartiles"),
    [
        ([5.0], (5.0, 5.0)),
        ([1.0, 3.0], (1.5, 2.5)),
        ([4.0, 1.0, 2.0, 3.0, 99.0], (2.0, 4.0)),
    ],
)
def test_quartiles_hold_half_of_the_rounds(
    seconds: list[float], quartiles: tuple[float, float]
) -> None:
    """A single disturbed round changes quartiles as little as the median."""
    assert quartiles == median_of(Timing(value, 0.0) for value in seconds).quartiles


def test_a_slow_round_is_a_low_speed() -> None:
    """The quartiles of a speed are those of the time, the other way round."""
    timing = Timing(2.0, 0.0, (1.0, 4.0))
    assert (Spread(4.0, 2.0, 8.0), Spread(0.5, 0.25, 1.0)) == (
        timing.speed(8.0),
        timing.relative_to(4.0),
    )
    assert "4.00 (2.00…8.00)" == str(timing.speed(8.0))
    assert Spread(4.0, 4.0, 4.0) == Timing(2.0, 0.0).speed(8.0)
