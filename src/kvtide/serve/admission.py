"""Admission: which request may start or come back, so that it isn't retracted again at once.

The length of the answers isn't known, and no page is kept for them: a retraction is cheap, and an
idle page isn't. Only `wait` keeps pages for the longest answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from kvtide.pool import PageAllocator
from kvtide.serve.prefix import PrefixCache
from kvtide.serve.request import Request
from kvtide.tide import Tide

_STEPS_AHEAD = 8
"""For how many steps all have room when a request comes back: so long its copies are worth it."""


@final
@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How steps are planned.

    `chunk_tokens` is the most tokens of one request in a step, and the most prompt tokens of all
    requests in a step. `on_pressure` is as in `EngineOptions`. `replay` splits recomputed tokens
    into the same steps as the first time.
    """

    chunk_tokens: int
    max_running: int
    on_pressure: str
    replay: bool


@final
class Admission:
    """Counts pages for a scheduler. It changes nothing."""

    def __init__(
        self, tide: Tide, pages: PageAllocator, prefixes: PrefixCache, options: SchedulerOptions
    ) -> None:
        self._tide = tide
        self._pages = pages
        self._prefixes = prefixes
        self._options = options
        self._offloads = options.on_pressure == "offload"

    def may_start(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether there is room for a new request beside the running ones.

        That is the pages for its known tokens, but for those that it shares with running requests,
        and the pages that the running requests' known tokens still lack. If no request runs, any
        request may start.
        """
        return self._has_room(request, running, 0)

    def has_room_again(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether there is room for a retracted request, also in the next steps of all.

        Where KV is computed again these are as many as a page has tokens.
        """
        return self._has_room(request, running, self._steps_ahead)

    def may_resume(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether there is room for a retracted request, once newer ones have given up theirs.

        `running` is in the order of arrival. Newer ones run only where they fill gaps.
        """
        if self.has_room_again(request, running):
            return True
        newer = [other for other in running if other.arrival > request.arrival]
        if not (newer and self._offloads):
            return False
        return self._lacking(request, running, self._steps_ahead, leaving=newer) <= 0

    def may_fill_gaps(self, request: Request) -> bool:
        """Whether a request may run though an older one has no room yet.

        The older one then takes its pages. That is cheap while host memory has room at once, for
        which blocks make way, unless they would have to be written to a tier.
        """
        arena, page_bytes = self._tide.arena, self._tide.pool.geometry.page_bytes
        room_bytes = arena.free_count * arena.block_bytes
        if not self._prefixes.has_tiers:
            room_bytes += self._prefixes.blocks.bytes_below
        return self._offloads and self._pages_for(request.longest) * page_bytes <= room_bytes

    @property
    def _steps_ahead(self) -> int:
        return _STEPS_AHEAD if self._offloads else self._tide.pool.page_size

    def _has_room(self, request: Request, running: Sequence[Request], steps: int) -> bool:
        if not running:
            return True
        has_place = len(running) < self._options.max_running
        return has_place and self._lacking(request, running, steps) <= 0

    def _lacking(
        self,
        request: Request,
        running: Sequence[Request],
        steps: int,
        *,
        leaving: Sequence[Request] = (),
    ) -> int:
        """How many pages are too few for a request, if those that are `leaving` had none."""
        needed = self._pages_for(self._counted(request, steps))
        needed -= self._prefixes.common_page_count(request, leaving)
        for other in set(running).difference(leaving):
            needed += max(0, self._pages_for(self._counted(other, steps)) - len(other.pages))
        free_count = self._pages.free_count + self._prefixes.idle_page_count
        return needed - free_count - self._prefixes.page_count_of_all(leaving)

    def _counted(self, request: Request, steps: int) -> int:
        """The tokens of a request for which there must be room."""
        if self._options.on_pressure == "wait":
            return request.longest
        return min(request.longest, request.token_count + steps)

    def _pages_for(self, token_count: int) -> int:
        return -(-token_count // self._tide.pool.page_size)
