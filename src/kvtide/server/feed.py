"""Feed: what an engine does, told to those who watch, and to nobody's cost if they are slow.

The engine's thread adds events. A watcher who hasn't fetched the last one gets it merged with the
next, so that at most one event waits for each.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from kvtide.serve.engine import Engine
from kvtide.server.errors import ApiError
from kvtide.server.events import Event, History, Recorder, merged

MOST_WATCHERS = 32
HEARTBEAT_S = 10.0
"""How long nothing is told: a client that vanished is noticed when something is sent to it."""
_SPAN_S, _MOST_SPANS = 1.0, 600
"""A watcher is told of the last ten minutes before, in steps of a second."""


@final
class Watcher:
    """One who watches: what was told and not fetched yet. Made and used in an asyncio loop."""

    def __init__(self, events: list[Event]) -> None:
        self._waiting = events
        self._changed = asyncio.Event()
        self._changed.set()
        self._loop = asyncio.get_running_loop()
        self.is_over = False

    async def fetch(self, feed: Feed) -> list[Event]:
        """What is new since the last call; waits for that, and tells the time if nothing comes."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
        return feed.taken(self)

    def take(self) -> list[Event]:
        """What waits, which then waits no more. The feed is locked."""
        events, self._waiting = self._waiting, []
        self._changed.clear()
        return events

    def tell(self, event: Event) -> None:
        """Has an event wait, with those that do so already. The feed is locked."""
        if len(self._waiting) == 1:
            self._waiting = [merged(self._waiting[0], event)]
        else:
            self._waiting.append(event)
        self.wake()

    def wake(self) -> None:
        """Ends the wait of `fetch`, from any thread."""
        with suppress(RuntimeError):  # the asyncio loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._changed.set)


@final
class Feed:
    """The events of an engine, for any number of watchers up to a limit. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._history = History(most=_MOST_SPANS, span_s=_SPAN_S, keeps_beginning=False)
        self._watchers: set[Watcher] = set()

    def observe(self, engine: Engine) -> None:
        """Tells what is new, if that is due. For the engine's thread, after a step."""
        if self._recorder is None:
            self._recorder = Recorder(engine)
        event = self._recorder.note(at_once=not engine.has_work)
        if event is None:
            return
        with self._lock:
            self._history.add(event)
            for watcher in self._watchers:
                watcher.tell(event)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """A watcher within this context. Raises ApiError if there are too many."""
        with self._lock:
            if len(self._watchers) >= MOST_WATCHERS:
                raise ApiError(
                    429,
                    f"{MOST_WATCHERS} pages watch this server already; close one of them",
                    retry_after_s=5,
                )
            watcher = Watcher(self._history.events)
            self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def taken(self, watcher: Watcher) -> list[Event]:
        """What waits for a watcher, and at last the time of now."""
        with self._lock:
            events = watcher.take()
        if self._recorder is None:
            return events
        return [*events, {"t": self._recorder.now_s}]

    def close(self) -> None:
        """Ends all watching, so that the server can end."""
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.is_over = True
            watcher.wake()
