"""The page of a server that works, in a real Chromium."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest
from selenium.webdriver.common.keys import Keys

from server.page.chromium import Browser
from server.page.live import LiveServer, live_server

KEY = "the-key-of-a-tenant"
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose pool has 24 pages."""
    with live_server(24 * 16) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, server: LiveServer) -> Iterator[Browser]:
    """Its page, open and connected; it must not make the console say anything."""
    chromium.open(server.url)
    chromium.show()
    chromium.wait_for("return look.text('connection') === 'live' && player !== null")
    yield chromium
    assert [] == chromium.errors()


def load(server: LiveServer, count: int) -> list[threading.Thread]:
    """Has prompts answered, all at once; gives the threads that wait for the answers."""

    def complete(number: int) -> None:
        body: dict[str, Any] = {"prompt": "ab" * (20 + 3 * number), "max_tokens": 40, "seed": 1}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits until something is so in this process, for as long as a slow machine may take."""
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def ask(page: Browser, prompt: str, most: int) -> None:
    """Writes a prompt, and sends it, by the keyboard alone."""
    page.run("byId('most').value = arguments[0]; byId('prompt').focus()", most)
    page.press(prompt, Keys.CONTROL + Keys.ENTER)


def test_the_page_follows_a_server_under_load(page: Browser, server: LiveServer) -> None:
    """While requests run it shows them; in the end it says what the engine says."""
    before = server.engine.stats.retractions
    with server.held_at(1):
        threads = load(server, 12)
        wait_until(lambda: server.service.live_count == 12)
        server.most_tokens = 30
        page.wait_for("return look.rows().length > 3")
    for thread in threads:
        thread.join()
    page.wait_for("return look.text('running') === '0' && Number(look.text('done')) > 11")
    stats = server.engine.stats
    assert stats.retractions > before
    assert str(stats.done) == page.look("text", "done")
    assert f"{stats.new_tokens:,} so far" == page.look("text", "tokens-note")
    times = "time" if stats.retractions == 1 else "times"
    said = f"{stats.retractions} {times} so far, {stats.resumes} restored"
    assert said == page.look("text", "retracted-note")
    assert page.run("return player.lanes.ticks.length") >= 1
    assert "tiny-random" == page.look("text", "subject")


def test_one_who_comes_later_sees_what_was_before(page: Browser, server: LiveServer) -> None:
    """The events of the time before are told at once, and the page can be moved to them."""
    for thread in load(server, 2):
        thread.join()
    page.open(server.url)
    page.wait_for("return player !== null && player.points.length > 1 && look.text('done') !== '0'")
    assert str(server.engine.stats.done) == page.look("text", "done")
    page.run("byId('moment').focus()")
    page.press(Keys.HOME)
    page.wait_for("return look.text('play') === 'Go live'")
    assert page.run("return player.at === 0 && !player.follows")
    page.press(Keys.SHIFT + Keys.TAB)
    page.press(Keys.ENTER)
    page.wait_for("return look.text('play') === 'Pause'")


def test_a_page_that_was_left_watches_no_more(page: Browser, server: LiveServer) -> None:
    """Its stream ends with it, and begins again when the browser shows it again."""
    watchers = server.service.feed._watchers
    assert 1 == len(watchers)
    page.driver.get("about:blank")
    wait_until(lambda: not watchers)
    page.driver.back()
    page.wait_for("return look.text('connection') === 'live'")
    wait_until(lambda: len(watchers) == 1)


def test_a_prompt_is_answered_and_the_next_turn_knows_of_it(
    page: Browser, server: LiveServer
) -> None:
    """The answer that is shown is the engine's, and all of the talk is sent again."""
    ask(page, "Tell me", 12)
    page.wait_for("return look.text('ask-state').startsWith('The answer has ended')")
    first = server.seen[max(server.seen)]
    assert ["Tell me", first.text] == page.look("said")
    assert "12 tokens in" in page.look("text", "ask-state")
    ask(page, MARKUP, 5)
    page.wait_for("return look.said().length === 4 && !byId('send').disabled")
    second = server.seen[max(server.seen)]
    assert ["Tell me", first.text, MARKUP, second.text] == page.look("said")
    assert len(second.prompt_ids) > len(first.prompt_ids) + len(MARKUP)
    assert 0 == page.run("return document.querySelectorAll('img, #talk script').length")
    page.run("byId('clear').click()")
    assert [] == page.look("said")


def test_an_answer_can_be_stopped(page: Browser, server: LiveServer) -> None:
    """The engine ends it, and what has been said of it stays."""
    with server.held_at(20):
        ask(page, "Go on", 300)
        page.wait_for("return look.said().length === 2 && look.said()[1].length > 2")
        page.run("byId('stop').focus()")
        page.press(Keys.ENTER)
        page.wait_for("return look.text('ask-state') === 'You stopped the answer.'")
    page.wait_for("return look.text('running') === '0'")
    request = server.seen[max(server.seen)]
    assert "abort" == request.finish_reason
    assert request.text.startswith(page.look("said")[1])
    assert server.engine.stats.running == 0


def test_an_error_of_the_server_is_told(page: Browser) -> None:
    """The server's own words say why there is no answer."""
    page.run("byId('prompt').value = 'x'.repeat(1200)")  # to type so much takes long
    ask(page, "x", 5)
    page.wait_for("return look.text('ask-state').startsWith('There is no answer')")
    assert "tokens" in page.look("text", "ask-state")
    page.settle()
    assert ["Failed to load resource: the server responded with a status of 400 (Bad Request)"] == [
        line.split(" - ")[1] for line in page.errors()
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_box_for_prompts_can_be_seen_and_is_named(
    width: int, scheme: str, page: Browser
) -> None:
    """A talk, and all beside it, has the contrasts of WCAG's AA; and each control has a name."""
    ask(page, "A word " * 4, 3)
    page.wait_for("return look.text('ask-state').startsWith('The answer has ended')")
    page.show(width, scheme)
    assert [] == page.audit() + page.nameless()
    names = {name for _, name, _ in page.tree()}
    assert {"Prompt", "Send", "Stop", "New talk", "At most", "Conversation"} <= names


def test_the_order_of_focus_has_the_box_for_prompts(page: Browser) -> None:
    """Tab goes through the time, the prompt and its buttons to the table."""
    page.run("document.activeElement.blur()")
    stops = []
    for _ in range(6):
        page.press(Keys.TAB)
        stops.append(page.look("focus"))
    names = ["play", "moment", "prompt", "send", "most", "scroll"]
    assert [[name, "solid"] for name in names] == stops


def test_a_key_is_asked_for_and_kept_in_memory_alone(chromium: Browser) -> None:
    """A wrong one is asked for again; a new tab asks anew."""
    with live_server(24 * 16, keys=(KEY,)) as server:
        chromium.open(server.url)
        for key, said in (("wrong-key", "the key is wrong"), (KEY, "live")):
            chromium.wait_for("return document.activeElement.id === 'key'")
            chromium.press(key, Keys.ENTER)
            chromium.wait_for("return look.text('connection') === arguments[0]", said)
        assert chromium.run("return byId('unlock').hidden && byId('key').value === ''")
        stored = "return [localStorage.length, sessionStorage.length, document.cookie]"
        assert [0, 0, ""] == chromium.run(stored)
        ask(chromium, "Hi", 2)
        chromium.wait_for("return look.text('ask-state').startsWith('The answer has ended')")
        assert KEY not in chromium.run("return document.documentElement.outerHTML")
        chromium.open(server.url)
        chromium.wait_for("return look.text('connection') === 'a key is needed'")
    chromium.errors()  # which has the calls that were refused


def test_a_server_that_ends_is_told_and_tried_again(chromium: Browser) -> None:
    """The page stays as it was."""
    with live_server(24 * 16) as server:
        chromium.open(server.url)
        chromium.wait_for("return look.text('connection') === 'live' && player !== null")
    chromium.wait_for("return look.text('connection').endsWith('trying again')")
    assert "0" == chromium.look("text", "running")
    chromium.open("about:blank")
    chromium.errors()
