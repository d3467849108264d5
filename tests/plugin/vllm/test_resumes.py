"""How much of a preempted request came back, and how much is computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtide.plugin.vllm.resumes import ResumeCounts


def step(
    new: dict[str, int] | None = None,
    running: dict[str, int] | None = None,
    resumed: dict[str, int] | None = None,
    scheduled: int = 1,
    finished: tuple[str, ...] = (),
) -> Any:
    """A step of the scheduler; for each request the tokens whose KV is there before it."""
    cached = {**(running or {}), **(resumed or {})}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=count)
            for name, count in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=list(cached.values()),
            resumed_req_ids=set(resumed or {}),
        ),
        num_scheduled_tokens=dict.fromkeys({*(new or {}), *cached}, scheduled),
        finished_req_ids=set(finished),
    )


def test_a_resumed_request_counts_what_came_back_and_what_did_not() -> None:
    """It had 260 tokens; 128 of them were on the device, and 100 came from host memory."""
    counts = ResumeCounts()
    assert not counts.note_step(step(new={"a": 0}, scheduled=250))
    for computed in range(250, 260):
        assert not counts.note_step(step(running={"a": computed}))
    counts.note_load("a", 100)
    counts.note_load("a", 0)  # when the load has ended
    found = counts.note_step(step(resumed={"a": 228}, scheduled=32))
    assert {"restored_tokens": 100, "recomputed_tokens": 32} == found
    assert not counts.note_step(step(running={"a": 260}))


def test_a_load_that_failed_restored_nothing() -> None:
    """The whole request is computed again."""
    counts = ResumeCounts()
    counts.note_step(step(new={"a": 0}, scheduled=250))
    counts.note_load("a", 128)
    assert {"recomputed_tokens": 250} == counts.note_step(step(resumed={"a": 0}, scheduled=250))


def test_a_load_that_failed_isnt_counted_with_what_the_device_has_later() -> None:
    """Asked again, vLLM finds the tokens in its own cache, and kvtide loads none."""
    counts = ResumeCounts()
    counts.note_step(step(new={"a": 0}, scheduled=250))
    counts.note_load("a", 128)
    counts.note_failure("a")
    counts.note_load("a", 0)
    assert {"recomputed_tokens": 122} == counts.note_step(step(resumed={"a": 128}, scheduled=122))


def test_a_hit_of_a_new_request_is_no_restore() -> None:
    """Nothing is kept of what has finished."""
    counts = ResumeCounts()
    counts.note_load("a", 128)
    assert not counts.note_step(step(new={"a": 128}, scheduled=10))
    assert not counts.note_step(step(finished=("a",)))
    assert not counts._computed
