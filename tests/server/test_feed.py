"""Watchers of an engine are told everything, and cost nothing when they are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import ExitStack
from typing import Any

import pytest

from kvtide.server.errors import ApiError
from kvtide.server.events import Event
from kvtide.server.feed import MOST_WATCHERS, Feed, Watcher
from kvtide.server.webpage import live_page
from support.serving import Served, serve_and

KEY = "key-of-a-tenant"


async def events_of(server: Served, count: int, **headers: str) -> AsyncIterator[Event]:
    """Yields the first events of a stream, until their sum says that so many answers have ended."""
    sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/events",
        "headers": raw,
        "query_string": b"",
    }
    received.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    task = asyncio.create_task(server.app(scope, received.get, sent.put))
    done = -1
    while done < count:
        for block in (await sent.get()).get("body", b"").decode().split("\n\n")[:-1]:
            event = json.loads(block.removeprefix("data: "))
            done = event.get("done", done)
            yield event
    received.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(task, 10)


def test_a_watcher_is_told_what_happens_and_one_who_comes_later_what_happened() -> None:
    """Both know in the end what the engine says; nobody watches when they have left."""

    async def watch(server: Served) -> None:
        early = asyncio.create_task(_known(server, 2))
        answers = [await server.complete(prompt="ab" * 40, max_tokens=9) for _ in range(2)]
        assert [200, 200] == [answer.status_code for answer in answers]
        for known in (await early, await _known(server, 2)):
            stats = server.engine.stats
            assert (stats.new_tokens, stats.prompt_tokens) == (
                known["new_tokens"],
                known["prompt_tokens"],
            )
            assert (2, 0) == (known["done"], known["running_count"])
        with server.service.feed.watching() as watcher:
            assert {watcher} == server.service.feed._watchers

    serve_and(watch)


async def _known(server: Served, count: int) -> Event:
    known: Event = {}
    async for event in events_of(server, count):
        known |= event
    return known


def test_events_need_a_key_where_there_are_keys() -> None:
    """The page itself has no secret; its events show what all tenants do."""

    async def watch(server: Served) -> None:
        refused = await asyncio.wait_for(server.client.get("/events"), 30)
        assert (401, "authentication_error") == (
            refused.status_code,
            refused.json()["error"]["type"],
        )
        async for event in events_of(server, 0, authorization=f"Bearer {KEY}"):
            assert "t" in event
        page = await server.client.get("/")
        assert (200, live_page().text) == (page.status_code, page.text)
        assert live_page().policy == page.headers["content-security-policy"]
        assert "nosniff" == page.headers["x-content-type-options"]

    serve_and(watch, keys=(KEY,))


def test_one_event_waits_for_a_watcher_who_is_slow() -> None:
    """It says what all say that weren't fetched, however many they are."""

    async def watch() -> None:
        watcher = Watcher([{"t": 0, "page_count": 4}])
        watcher.take()
        for number in range(1000):
            watcher.tell({"t": number, "pages": [[number % 4, 1, number]]})
        (event,) = watcher.take()
        assert [[page, 1, 996 + page] for page in range(4)] == event["pages"]
        assert (999, []) == (event["t"], watcher.take())

    asyncio.run(watch())


def test_there_are_only_so_many_watchers_and_a_feed_that_closes_ends_all() -> None:
    """The next one is told to come later, and has a place when another one has left."""

    async def watch() -> None:
        feed = Feed()
        contexts = [feed.watching() for _ in range(MOST_WATCHERS)]
        watchers = [context.__enter__() for context in contexts]
        with pytest.raises(ApiError) as caught, feed.watching():
            pass
        assert 429 == caught.value.status
        contexts[0].__exit__(None, None, None)
        with feed.watching() as another:
            feed.close()
            assert another.is_over
        assert all(watcher.is_over for watcher in watchers[1:])
        for context in contexts[1:]:
            context.__exit__(None, None, None)

    asyncio.run(watch())


def test_a_server_that_ends_ends_the_streams() -> None:
    """A page that is open doesn't keep the server from ending."""

    async def watch(server: Served) -> None:
        stream = asyncio.create_task(_known(server, 99))
        while not server.service.feed._watchers:
            await asyncio.sleep(0.01)
        server.service.feed.close()
        while server.service.feed._watchers:
            await asyncio.sleep(0.01)
        stream.cancel()

    serve_and(watch)


def test_one_watcher_too_many_gets_an_answer_that_says_so() -> None:
    """The route tells it as any other error."""

    async def watch(server: Served) -> None:
        with ExitStack() as others:
            for _ in range(MOST_WATCHERS):
                others.enter_context(server.service.feed.watching())
            refused = await asyncio.wait_for(server.client.get("/events"), 30)
        assert (429, "5") == (refused.status_code, refused.headers["retry-after"])
        assert "close one of them" in refused.json()["error"]["message"]

    serve_and(watch)
