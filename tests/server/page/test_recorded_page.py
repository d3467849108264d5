"""The page of a recording, in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.server.events import FREE, KEPT, Event, Recorder
from kvtide.server.webpage import recorded_page
from serve.harness import check_rows_once, make_requests, tiny, token_bytes
from server.page.chromium import Browser

PAGE_COUNT, PAGE = 24, 16


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """What an engine did that had too small a pool, and half of whose prompts begin alike."""
    with pytest.MonkeyPatch.context() as patch:
        check_rows_once(patch)
        source = tiny()
        options = EngineOptions(
            kv_memory_bytes=PAGE_COUNT * PAGE * token_bytes(source),
            page_size=PAGE,
            chunk_tokens=PAGE,
            host_memory_bytes=4 << 20,
            disk_dir=tmp_path_factory.mktemp("kv"),
            disk_memory_bytes=8 << 20,
        )
        engine = Engine.build(source, options)
    requests = make_requests(7, count=16, longest_answer=60)
    for request in requests[::2]:
        request.prompt_ids[:0] = range(4, 4 + 5 * PAGE)
    clock = iter(range(10_000))
    recorder = Recorder(engine, clock=lambda: next(clock) / 8)
    found = [recorder.note(at_once=True)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        found.append(recorder.note(at_once=True))
    assert engine.stats.retractions > 2
    engine.close()
    return [event for event in found if event is not None]


@pytest.fixture
def page(chromium: Browser, events: list[Event], tmp_path: Path) -> Iterator[Browser]:
    """The page of these events, open; it must not make the console say anything."""
    path = tmp_path / "page.html"
    path.write_text(recorded_page("tiny-random, 16 requests", events), encoding="utf-8")
    chromium.open(path.as_uri())
    chromium.show()
    yield chromium
    assert [] == chromium.errors()


def known_at(events: list[Event], last: int) -> tuple[Event, list[int]]:
    """What is so after the event with that number: the counts, and who holds each page."""
    state: Event = {}
    holders = [FREE] * PAGE_COUNT
    for event in events[: last + 1]:
        state |= event
        for first, count, holder in event.get("pages", []):
            holders[first : first + count] = [holder] * count
    return state, holders


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_everything_can_be_seen(width: int, scheme: str, page: Browser) -> None:
    """Text, edges and colours have the contrasts of WCAG's AA, and nothing is cut off."""
    page.show(width, scheme)
    assert [] == page.audit()


def test_the_page_opens_at_the_busiest_moment_and_shows_what_was_so(
    page: Browser, events: list[Event]
) -> None:
    """The figures, the meters and the table say what the events say."""
    moment = page.run("return player.at")
    state, holders = known_at(events, moment)
    assert state["retracted_count"] == max(
        known_at(events, n)[0]["retracted_count"] for n in range(len(events))
    )
    for name, key in (
        ("running", "running_count"),
        ("retracted", "retracted_count"),
        ("done", "done"),
    ):
        assert str(state[key]) == page.look("text", name)
    rows = page.look("rows")
    runs = [[str(n), "runs", str(holders.count(n)), str(times)] for n, times in state["running"]]
    assert runs == rows[: len(runs)]
    assert [str(row[0]) for row in state["retracted"]] == [row[0] for row in rows[len(runs) :]]
    held = sum(holder not in (FREE, KEPT) for holder in holders)
    label = page.run("return document.getElementById('pool').getAttribute('aria-label')")
    assert f"{PAGE_COUNT} pages: {held} held by requests" in label
    assert f"{held * PAGE} of {PAGE_COUNT * PAGE} tokens" == page.look("text", "pool-text")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_has_the_colour_of_its_request(
    scheme: str, page: Browser, events: list[Event]
) -> None:
    """At every tenth moment two pages have one colour if they have one holder, and only then."""
    page.show(1600, scheme)
    seen: set[int] = set()
    for moment in range(0, len(events), 10):
        page.look("seek", moment)
        colours: dict[int, list[int]] = {}
        holders = known_at(events, moment)[1]
        for holder, colour in zip(holders, page.look("squares", PAGE_COUNT), strict=True):
            if holder >= FREE:  # the others have a pattern
                assert colour == colours.setdefault(holder, colour)
        assert len(colours) == len({tuple(colour) for colour in colours.values()})
        seen |= {*holders}
    assert len(seen) > 8


def test_pages_that_are_shared_or_kept_have_a_pattern(page: Browser, events: list[Event]) -> None:
    """They can be told apart without colours: stripes, an edge alone, and a number for others."""
    kinds: dict[str, int] = {}
    for moment in range(len(events)):
        _, holders = known_at(events, moment)
        wanted = {"shared": min(holders), "kept": KEPT, "own": max(holders)}
        for kind, holder in wanted.items():
            is_it = {"shared": holder < KEPT, "kept": True, "own": holder > FREE}[kind]
            if kind in kinds or holder not in holders or not is_it:
                continue
            page.look("seek", moment)
            kinds[kind] = page.look("colours", PAGE_COUNT, holders.index(holder))
    assert {"shared", "kept", "own"} == {*kinds}
    assert 1 == kinds["kept"]
    assert min(kinds["shared"], kinds["own"]) > 3


def test_the_time_can_be_moved_by_keyboard(page: Browser, events: list[Event]) -> None:
    """Home is the beginning, End the end, and an arrow is the next moment."""
    page.run("byId('moment').focus()")
    page.press(Keys.END)
    page.settle()
    state, _ = known_at(events, len(events) - 1)
    assert (str(state["done"]), "0") == (page.look("text", "done"), page.look("text", "running"))
    assert f"{state['new_tokens']:,} so far" == page.look("text", "tokens-note")
    page.press(Keys.HOME)
    page.settle()
    assert ("0", "0 so far") == (page.look("text", "done"), page.look("text", "tokens-note"))
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.settle()
    assert f"{known_at(events, 2)[0]['new_tokens']:,} so far" == page.look("text", "tokens-note")
    assert 2 == page.run("return player.at")


def test_a_recording_plays_to_its_end(page: Browser, events: list[Event]) -> None:
    """Play begins anew behind the end, and takes half a minute at most."""
    page.run("player.seek(player.events.length); byId('play').focus()")
    page.run("performance.now = () => 0")
    page.press(Keys.ENTER)
    page.settle()
    assert ([True, 0], "Pause") == (
        page.run("return [isPlaying, player.at]"),
        page.look("text", "play"),
    )
    page.run("performance.now = () => 15000")
    page.wait_for("return player.at > 0")
    moment = page.run("return player.at")
    began, ended = events[0]["t"], events[-1]["t"]
    reached = began + 15 * max(1, (ended - began) / 30)
    assert events[moment]["t"] <= reached < events[moment + 1]["t"]
    page.run("performance.now = () => 60000")
    page.wait_for("return !isPlaying")
    assert len(events) - 1 == page.run("return player.at")
    page.settle()
    assert "Play" == page.look("text", "play")


def test_a_screen_reader_finds_names_headings_and_tables(page: Browser) -> None:
    """Chromium's own tree for assistive technology has a name for whatever is of use."""
    assert [] == page.nameless()
    nodes = page.tree()
    headings = [name for role, name, _ in nodes if role == "heading"]
    assert ["kvtide", "Pages of the pool", "Over time", "Memory", "Requests"] == headings
    assert ["H1", *["H2"] * 4] == page.look("levels")
    assert ["Request", "State", "Pages", "Retracted"] == [
        n for r, n, _ in nodes if r == "columnheader"
    ]
    assert {"main", "banner", "status", "slider", "meter", "image"} <= {
        role for role, _, _ in nodes
    }
    values = {name: node["value"]["value"] for role, name, node in nodes if role == "meter"}
    assert {"Pool", "Host memory", "Disk"} == {*values}
    assert ["connection", "ask-state"] == page.look("live")  # which change seldom


def test_the_focus_goes_through_the_page_in_order_and_can_be_seen(page: Browser) -> None:
    """Tab stops where something can be done, in the order of the page."""
    page.run("document.activeElement.blur()")
    stops = []
    for _ in range(3):
        page.press(Keys.TAB)
        stops.append(page.look("focus"))
    assert [["play", "solid"], ["moment", "solid"], ["scroll", "solid"]] == stops


def test_nothing_moves_for_those_who_want_no_motion(page: Browser) -> None:
    """No element has a transition or an animation then; otherwise the meters have."""
    assert page.look("moving") == 3
    page.show(1600, motion="reduce")
    assert page.look("moving") == 0
