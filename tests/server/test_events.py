"""What the page is told of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.request import Request, SamplingParams
from kvtide.server.events import FREE, KEPT, Event, History, Recorder, merged
from serve.harness import check_rows_once, make_requests, tiny, token_bytes

PAGE = 16


class Clock:
    """A clock that a test moves; `step_s` goes by with each look at it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now = 100.0
        self.step_s = step_s

    def __call__(self) -> float:
        """The seconds now."""
        self.now += self.step_s
        return self.now


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose pool has six pages."""
    check_rows_once(monkeypatch)
    source = tiny()
    options = EngineOptions(
        kv_memory_bytes=6 * PAGE * token_bytes(source), page_size=PAGE, chunk_tokens=PAGE
    )
    engine = Engine.build(source, options)
    yield engine
    engine.close()


def drawn(events: list[Event]) -> tuple[Event, list[int]]:
    """What a reader of the events knows: the state, and who holds each page."""
    state: Event = {}
    holders = [FREE] * events[0]["page_count"]
    for event in events:
        state |= event
        for first, count, holder in state.pop("pages", []):
            holders[first : first + count] = [holder] * count
    return state, holders


def watched(engine: Engine, requests: list[Request]) -> list[Event]:
    """Answers the requests, and gives the events of all steps, each compared with the engine."""
    recorder = Recorder(engine)
    events = [event for event in [recorder.note(at_once=True)] if event is not None]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        event = recorder.note(at_once=True)
        assert event is not None
        events.append(event)
        assert_told(engine, events)
    return events


def assert_told(engine: Engine, events: list[Event]) -> None:
    """The events say of each page, and of each request, what is so."""
    state, holders = drawn(events)
    books, stats = engine.scheduler, engine.stats
    assert engine.pages.free_count == holders.count(FREE)
    assert books.prefixes.idle_page_count == holders.count(KEPT)
    for request in books.running:
        mine = {request.arrival + 1, *range(-len(books.running), KEPT)}
        assert {holders[page] for page in request.pages} <= mine
    assert [[r.arrival + 1, r.retractions] for r in books.running] == state["running"]
    assert [r.arrival + 1 for r in books.retracted] == [row[0] for row in state["retracted"]]
    for name in ("waiting", "done", "failed", "new_tokens", "retractions", "resumes", "host_bytes"):
        assert getattr(stats, name) == state[name]
    assert (stats.running, stats.retracted) == (state["running_count"], state["retracted_count"])


def test_events_say_who_holds_each_page_and_who_gave_them_up(small: Engine) -> None:
    """They do after each step, also while requests are retracted and come back."""
    events = watched(small, make_requests(3, count=8))
    state, holders = drawn(events)
    assert state["retractions"] == state["resumes"] > 0
    assert "host" in {row[2] for event in events for row in event.get("retracted", [])}
    assert {FREE, KEPT} >= set(holders)
    assert (8, 0) == (state["done"] + state["failed"], state["running_count"])


def test_pages_that_several_requests_read_are_told_apart(small: Engine) -> None:
    """A page that two requests read says so, and one that nobody reads any more is kept."""
    prompt = list(range(4, 4 + 4 * PAGE))
    first, second = (
        Request(name, [*prompt, 40 + number], SamplingParams(max_new_tokens=4, seed=number))
        for number, name in enumerate("ab")
    )
    events = watched(small, [first, second])
    owners = {row[2] for event in events for row in event.get("pages", [])}
    assert {1, 2, -2, KEPT} <= owners
    assert 4 * PAGE == drawn(events)[0]["cached_tokens"]


def test_events_have_nothing_of_prompts_and_ids(small: Engine) -> None:
    """They are numbers, under names that this test knows, and the places of KV."""
    requests = make_requests(5, count=6)
    for request in requests:
        request.id, request.key, request.salt = f"secret {request.id}", "secret key", b"secret salt"
    events = watched(small, requests)
    assert "secret" not in json.dumps(events)
    texts = {
        leaf for event in events for leaf in leaves(event) if not isinstance(leaf, int | float)
    }
    assert texts <= {"host", "below", "nowhere"}


def leaves(value: Any) -> Iterator[object]:
    """Yields the values in objects and lists."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_a_quiet_moment_is_told_in_few_bytes(small: Engine) -> None:
    """An event has what changed alone."""
    recorder = Recorder(small, clock=Clock())
    first, second = recorder.note(at_once=True), recorder.note(at_once=True)
    assert first is not None
    assert {"t": 0.0} == second
    assert len(json.dumps(first)) < 700


@pytest.mark.parametrize(("step_s", "told"), [(0.0, [0, 10, 20]), (0.0043, [0, 22])])
def test_events_come_at_most_ten_times_a_second_and_less_often_if_they_take_long(
    step_s: float, told: list[int], small: Engine
) -> None:
    """An event that takes 4.3 ms is followed by another one after 215 ms."""
    clock = Clock()
    recorder = Recorder(small, clock=clock)
    seen = []
    for moment in range(30):
        clock.now, clock.step_s = 100 + moment / 100, step_s
        if recorder.note() is not None:
            seen.append(moment)
    assert told == seen


HOLDERS = st.lists(st.integers(-3, 3), min_size=8, max_size=8)


def told_of(states: list[list[int]]) -> list[Event]:
    """The events that a recorder would make of pages with these holders."""
    before = [0] * len(states[0])
    events = []
    for number, state in enumerate(states):
        changed = np.array(state) != np.array(before)
        runs = [[page, 1, state[page]] for page in np.nonzero(changed)[0].tolist()]
        events.append({"t": number, "page_count": 8, **({"pages": runs} if runs else {})})
        before = state
    return events


@given(st.lists(HOLDERS, min_size=2, max_size=12))
def test_merged_events_say_the_same(states: list[list[int]]) -> None:
    """One event says what they say one by one, and has one run for pages side by side."""
    first, *others = told_of(states)
    whole = first
    for event in others:
        whole = merged(whole, event)
    assert drawn([first, *others]) == drawn([whole])
    assert states[-1] == drawn([whole])[1]
    halves: list[Event] = [{"t": 98, "pages": [[0, 3, 1]]}, {"t": 99, "pages": [[3, 5, 1]]}]
    assert [[0, 8, 1]] == merged(merged(whole, halves[0]), halves[1])["pages"]


@given(
    st.lists(HOLDERS, min_size=1, max_size=60),
    st.integers(2, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_history_is_bounded_and_ends_as_it_was(
    states: list[list[int]], most: int, span_s: int, keeps_beginning: bool
) -> None:
    """However much has happened there are at most `most` events, and they lead to what is now."""
    history = History(most=most, span_s=span_s, keeps_beginning=keeps_beginning)
    for event in told_of(states):
        history.add(event)
        assert len(history.events) <= most
    assert states[-1] == drawn(history.events)[1]
    times = [event["t"] for event in history.events]
    assert (sorted(set(times)), len(states) - 1) == (times, times[-1])


def test_a_history_keeps_its_beginning_or_its_end() -> None:
    """A whole run is kept in coarser steps; of a server the last minutes are kept as they are."""
    whole, window = History(most=8), History(most=8, keeps_beginning=False)
    for event in told_of([[number] * 8 for number in range(1, 101)]):
        whole.add(event)
        window.add(event)
    assert [92, 93, 94, 95, 96, 97, 98, 99] == [event["t"] for event in window.events]
    gaps = np.diff([event["t"] for event in whole.events])
    assert 4 <= len(whole.events)
    assert gaps.max() <= 100 // 4
