"""Events: what an engine does, as small JSON objects, which the page draws.

The first event has everything, and each later one has what changed since the one before. So a later
event wins, and two that follow each other can be merged to one. An event has numbers alone: nothing
of a prompt or of an answer, no key, and of a request its number in the order of arrival.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from kvtide.serve.engine import Engine
from kvtide.serve.request import Request

Event: TypeAlias = dict[str, Any]
"""`t` is seconds since the recording began. `pages` has `[first page, count, holder]` for pages
that changed hands: a holder above 0 is a request's number, FREE and KEPT are below, and -n is n
requests, 2 or more, that share the page. `running` has `[number, retractions]` for each request,
`retracted` `[number, retractions, place of its KV]`. The others are counts and bytes: see
EngineStats."""

FREE = 0
"""The holder of a page that nobody holds."""
KEPT = -1
"""The holder of a page that no request reads now: its KV is kept for later ones."""

_PAUSE_S = 0.1
_WORTH = 50
"""An event may take a fiftieth of the time: with a large pool there are fewer a second."""
_MOST_LISTED = 256
"""The most requests that an event lists; its counts have all of them."""
_COUNTS = (
    *("waiting", "done", "failed", "new_tokens", "prompt_tokens", "recomputed_tokens"),
    *("retractions", "resumes", "offloaded_bytes", "restored_bytes", "host_bytes", "disk_bytes"),
)
_Holders: TypeAlias = npt.NDArray[np.int64]


@final
class Recorder:
    """Looks at an engine between its steps, and makes events. For the engine's thread alone."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._engine = engine
        self._clock = clock
        self._began = clock()
        self._due = self._began
        self._known: Event = {}
        self._holders: _Holders = np.full(engine.pages.page_count, FREE)

    @property
    def now_s(self) -> float:
        """Seconds since the recording began. For any thread."""
        return round(self._clock() - self._began, 3)

    def note(self, *, at_once: bool = False) -> Event | None:
        """The event of this moment; None if the last one is so new that it needn't be told yet."""
        started = self._clock()
        if started < self._due and not at_once:
            return None
        state = _state_of(self._engine) if self._known else _first_state_of(self._engine)
        holders = _holders_in(self._engine)
        event = {name: value for name, value in state.items() if self._known.get(name) != value}
        if pages := _runs(holders, holders != self._holders):
            event["pages"] = pages
        self._known.update(state)
        self._holders = holders
        self._due = started + max(_PAUSE_S, _WORTH * (self._clock() - started))
        return {"t": round(started - self._began, 3), **event}


def merged(first: Event, second: Event) -> Event:
    """One event that says what these two say, of which the second came later."""
    both = first | second
    if "pages" in first and "pages" in second:
        both["pages"] = _overlaid([*first["pages"], *second["pages"]])
    return both


@final
class History:
    """The events of any time, in bounded memory: at most `most`, merged within each `span_s`.

    When there are more, either the spans become longer, or the oldest events are merged into one.
    """

    def __init__(
        self, *, most: int = 1500, span_s: float = 0.0, keeps_beginning: bool = True
    ) -> None:
        """Without `keeps_beginning` the oldest ones are merged; the last stay as they are."""
        self._events: deque[Event] = deque()
        self._most = most
        self._span_s = span_s
        self._begun = 0.0
        self._keeps_beginning = keeps_beginning

    @property
    def events(self) -> list[Event]:
        """The events that say how it came to what is now."""
        return list(self._events)

    def add(self, event: Event) -> None:
        """Takes the next event."""
        if self._events and event["t"] - self._begun <= self._span_s:
            self._events[-1] = merged(self._events[-1], event)
            return
        self._events.append(event)
        self._begun = event["t"]
        if len(self._events) > self._most:
            self._shorten()

    def _shorten(self) -> None:
        if not self._keeps_beginning:
            first, second = self._events.popleft(), self._events.popleft()
            self._events.appendleft(merged(first, second))
            return
        events = list(self._events)
        self._events.clear()
        self._span_s = 2 * (events[-1]["t"] - events[0]["t"]) / len(events)
        for event in events:
            self.add(event)


def _state_of(engine: Engine) -> Event:
    """All that may change, but for the pages."""
    stats, books = engine.stats, engine.scheduler
    return {
        "running": [_about(request) for request in books.running[:_MOST_LISTED]],
        "retracted": [[*_about(r), _place_of(r)] for r in books.retracted[:_MOST_LISTED]],
        "running_count": stats.running,
        "retracted_count": stats.retracted,
        "cached_tokens": sum(stats.cached_tokens.values()),
        **{name: getattr(stats, name) for name in _COUNTS},
    }


def _first_state_of(engine: Engine) -> Event:
    """The same, and what never changes."""
    stats, pool = engine.stats, engine.tide.pool
    return {
        "page_count": pool.page_count,
        "page_tokens": pool.page_size,
        "page_bytes": pool.geometry.page_bytes,
        "host_limit_bytes": stats.host_limit_bytes,
        "disk_limit_bytes": stats.disk_limit_bytes,
        **_state_of(engine),
    }


def _about(request: Request) -> list[Any]:
    return [request.arrival + 1, request.retractions]


def _place_of(request: Request) -> str:
    """Where the KV of a retracted request is; `nowhere` if it must be computed again."""
    if request.snapshot is None:
        return "nowhere"
    return "below" if request.snapshot.is_below else "host"


def _holders_in(engine: Engine) -> _Holders:
    """Who holds each page, int64 [page]."""
    holders: _Holders = np.full(engine.pages.page_count, FREE)
    books = engine.scheduler
    for request in books.running:
        holders[request.pages] = request.arrival + 1
    for block in books.prefixes.blocks_here:
        if block.readers != 1:
            holders[block.pages] = -block.readers if block.readers else KEPT
    return holders


def _runs(holders: _Holders, is_told: npt.NDArray[np.bool_]) -> list[list[int]]:
    """The pages that are told, as `[first page, count, holder]` for pages side by side."""
    (pages,) = np.nonzero(is_told)
    told = holders[pages]
    begins = np.nonzero((np.diff(pages, prepend=-2) != 1) | (np.diff(told, prepend=0) != 0))[0]
    counts = np.diff(begins, append=pages.size)
    runs = zip(pages[begins].tolist(), counts.tolist(), told[begins].tolist(), strict=True)
    return [list(run) for run in runs]


def _overlaid(runs: Sequence[Iterable[int]]) -> list[list[int]]:
    """The runs that say the same, of which a later one wins."""
    page_count = max(first + count for first, count, _ in runs)
    holders: _Holders = np.zeros(page_count, np.int64)
    is_told = np.zeros(page_count, np.bool_)
    for first, count, holder in runs:
        holders[first : first + count] = holder
        is_told[first : first + count] = True
    return _runs(holders, is_told)
