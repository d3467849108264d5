"""Seeker: looks in tiers for blocks that other engines left, while steps go on.

A request waits for its next block only a short while, and other requests don't wait with it. A tier
that is slower than that isn't waited for again for some time: its blocks are computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, final

from kvtide.serve.request import Request
from kvtide.snapshot import Snapshot
from kvtide.tier import Spill
from kvtide.tier.search import Search

_PATIENCE_S = 1.0
"""How long a request waits for one block, or for a search."""
_REST_S = 30.0
"""For how long nobody waits after a block that was too slow."""
_GLANCE_S = 0.001
"""How long a step waits for a new search, since most tiers answer at once."""


class Sought(NamedTuple):
    """The blocks of a request that tiers are asked for, from number `first` on."""

    request: Request
    first: int
    names: list[str]
    """The keys of whole blocks."""
    tails_at: Callable[[int], Iterable[str]]
    """The keys of tails behind so many of these, of which the first that is found is the best."""


@final
class Seeker:
    """Searches for requests, one after another, in another thread. Not thread-safe."""

    def __init__(
        self,
        spill: Spill,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spill = spill
        self._clock = clock
        self._sleep = sleep
        self._line: OrderedDict[Request, Sought] = OrderedDict()
        """What is searched for next, the oldest first."""
        self._search: tuple[Sought, Search] | None = None
        self._asked: dict[Request, bool] = {}
        """The requests that were searched for, and whether that hasn't ended."""
        self._found: list[tuple[Sought, list[Snapshot]]] = []
        self._since: dict[Request, tuple[str | None, float]] = {}
        """What a request waits for, and since when."""
        self._rests_until = float("-inf")

    def has_sought(self, request: Request) -> bool:
        """Whether a search for the request's blocks has begun, or has ended."""
        return request in self._asked

    def seek(self, sought: Sought) -> None:
        """Begins a search, when those before it have ended."""
        self._asked[sought.request] = True
        self._line[sought.request] = sought
        self._go_on()
        if len(self._line) == 0:
            self._sleep(_GLANCE_S)

    def is_seeking(self, request: Request) -> bool:
        """Whether a search for the request's blocks hasn't ended."""
        self._go_on()
        return self._asked.get(request, False)

    def found(self) -> list[tuple[Sought, list[Snapshot]]]:
        """What searches have found since the last call; the caller discards it."""
        self._go_on()
        found, self._found = self._found, []
        return found

    def may_wait(self, request: Request, awaited: str | None) -> bool:
        """Whether the request had better wait for its next block than compute it.

        `awaited` is the key of the block that is on its way; None while one is searched for.
        """
        now = self._clock()
        if now < self._rests_until:
            return False
        before, since = self._since.get(request, (awaited, now))
        if before != awaited:  # that wait has ended
            since = now
        self._since[request] = awaited, since
        if now - since <= _PATIENCE_S:
            return True
        self._rests_until = now + _REST_S
        return False

    def note_progress(self, request: Request) -> None:
        """The request waits no longer for the block that it waited for, if it did."""
        self._since.pop(request, None)

    def forget(self, request: Request) -> None:
        """Forgets a request in any state; it may be searched for anew."""
        self._asked.pop(request, None)
        self._line.pop(request, None)
        self._since.pop(request, None)

    def pause(self) -> None:
        """Waits a moment: all requests wait for blocks."""
        self._sleep(_GLANCE_S)

    def _go_on(self) -> None:
        """Takes the result of a search that has ended, and begins the next."""
        if self._search is not None:
            sought, search = self._search
            if not search.has_ended():
                return
            self._search = None
            self._found.append((sought, self._spill.take(search)))
            if sought.request in self._asked:
                self._asked[sought.request] = False
        if self._line and self._search is None:
            _, sought = self._line.popitem(last=False)
            self._search = sought, self._spill.seek(sought.names, sought.tails_at)
