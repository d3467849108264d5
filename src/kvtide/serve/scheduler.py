"""Scheduler: which requests run, which wait, and which must give up their KV for now.

Requests run in the order of their arrival. When no page is free the newest running request is
retracted. Retracted requests come back, the oldest first, before any new request is admitted. Where
a retraction costs no more than a copy, no page idles for that: newer requests run in pages that an
older one can't use yet, and give them up as soon as it can.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

from kvtide.errors import ArenaFull, KvtideError, SlotsLost, SnapshotDamaged, SnapshotMiss
from kvtide.pool import PageAllocator
from kvtide.serve.admission import Admission, SchedulerOptions
from kvtide.serve.branches import Branches
from kvtide.serve.prefix import PrefixCache
from kvtide.serve.request import Request
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide

_READ_AHEAD = 2
"""For how many requests KV is read from its tier before they come."""

_GAPS_TRIED = 8
"""How many retracted requests are looked at in a step, from the oldest on."""


@final
@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start. Seconds are wall time in which the engine waited for a copy.

    `damaged` counts snapshots whose bytes differed from their seal, `lost` counts restores that
    failed while they wrote, `missing` counts snapshots that no tier gave back.
    """

    retractions: int = 0
    resumes: int = 0
    recomputed_tokens: int = 0
    arena_full: int = 0
    damaged: int = 0
    lost: int = 0
    missing: int = 0
    offload_seconds: float = 0.0
    restore_seconds: float = 0.0

    @property
    def misses(self) -> dict[str, int]:
        """How often KV was lost, by the reason."""
        reasons = ("arena_full", "damaged", "lost", "missing")
        return {reason: getattr(self, reason) for reason in reasons}


@final
class Scheduler:
    """Decides which request has which pages; `tide` copies their KV."""

    def __init__(
        self,
        tide: Tide,
        pages: PageAllocator,
        options: SchedulerOptions,
        key_of: Callable[[Request], str] = lambda request: request.id,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """`key_of` gives the key of a snapshot that is made of a request now.

        Without `prefixes` requests share no KV.
        """
        self.prefixes = prefixes or PrefixCache(tide, pages)
        self._key_of = key_of
        self._tide = tide
        self._pages = pages
        self._page_size = tide.pool.page_size
        self._options = options
        self._admission = Admission(tide, pages, self.prefixes, options)
        self._waiting: deque[Request] = deque()
        self._retracted: list[Request] = []
        self._running: list[Request] = []
        self._arrivals = 0
        self._waits = False
        """Whether a request took no part in the last step, since it waits for a tier."""
        self.stats = SchedulerStats()

    @property
    def waiting_count(self) -> int:
        """Requests that have not run yet."""
        return len(self._waiting)

    @property
    def retracted_count(self) -> int:
        """Requests that gave up their pages and wait to come back."""
        return len(self._retracted)

    def add(self, request: Request) -> None:
        """Takes a request. The caller has checked that it fits into the empty pool."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(request)

    def go_on(self, request: Request) -> None:
        """Takes a request that has a snapshot and `stored` tokens in it, from an earlier run."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._retracted.append(request)

    def plan(self) -> list[tuple[Request, int]]:
        """The next step: the requests and how many tokens each computes. Their pages are acquired.

        May retract and resume requests. Empty only when no request is left. Requests whose next
        tokens come from a tier take no part; if all do, it waits for the first of them.
        """
        while not (steps := self._planned()) and self._waits:
            self.prefixes.pause()
        return steps

    def _planned(self) -> list[tuple[Request, int]]:
        self._waits = False
        self._resume()
        self._admit()
        self._read_ahead()
        budget = self._options.chunk_tokens
        steps: list[tuple[Request, int]] = []
        computed = Branches()
        for request in list(self._running):
            if request not in self._running:
                continue  # just retracted to make room for an older request
            is_behind = request.stored + 1 < request.token_count  # beyond its newest token
            if is_behind and not self.prefixes.read(request, computed):
                self._waits = True
                continue
            count = self._next_count(request)
            # A chunk that doesn't fit waits as a whole: its length must not depend on others.
            if count > 1 and count > budget:
                continue
            if not self._make_room(request, count):
                continue
            if is_behind or not request.output_ids:
                self.prefixes.note_step(request, count, computed)
            if count > 1:
                budget -= count
            steps.append((request, count))
        return steps

    def note_computed(self, steps: Sequence[tuple[Request, int]]) -> None:
        """Takes a step that the model has run: its tokens have KV now, which others may read."""
        for request, count in steps:
            if request.lost > request.stored:
                self.stats.recomputed_tokens += min(count, request.lost - request.stored)
            request.stored += count
            self.prefixes.share(request)

    def remove(self, request: Request) -> None:
        """Forgets a request in any state, and gives back its pages and its snapshot."""
        # Most requests end while they run; a search through many waiting ones takes long.
        for requests in (self._running, self._retracted, self._waiting):
            if request in requests:
                requests.remove(request)
                break
        self.prefixes.forget(request)
        if request.snapshot is not None:
            self._tide.discard(request.snapshot)
            request.snapshot = None

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold pages, oldest first."""
        return tuple(self._running)

    @property
    def retracted(self) -> tuple[Request, ...]:
        """The requests that gave up their pages and wait to come back, oldest first."""
        return tuple(self._retracted)

    # ---- taking pages away -----------------------------------------------------------

    def retract(self, request: Request) -> None:
        """Takes a running request's pages away. `plan` resumes it when there is room.

        After an unexpected error it still runs, with its pages.
        """
        had_kv = request.stored > 0  # a request without KV only waits again
        if had_kv and self._options.on_pressure == "offload":
            self._offload(request)
        if request.snapshot is None:
            self._forget(request)
        request.retractions += had_kv
        self.stats.retractions += had_kv
        self._running.remove(request)
        insort(self._retracted, request, key=lambda other: other.arrival)

    def _make_room(self, request: Request, count: int) -> bool:
        """Acquires the pages for `count` more tokens. False if the request had to be retracted."""
        needed = self._pages_for(request.stored + count) - len(request.pages)
        if needed <= 0:
            return True
        while not self.prefixes.blocks.make_room(needed):
            assert self._options.on_pressure != "wait", "a request started without room for all"
            victim = self._running[-1]
            self.retract(victim)
            if victim is request:
                return False
        pages = self._pages.acquire(needed)
        assert pages is not None, "there is room"
        request.pages += pages
        return True

    def _offload(self, request: Request) -> None:
        started = time.perf_counter()
        key = request.snapshot_key = self._key_of(request)
        while request.snapshot is None:
            try:
                request.snapshot = self._saved(request, key)
            except ArenaFull:
                if not self.prefixes.blocks.give_way():
                    self.stats.arena_full += 1
                    break
        self.stats.offload_seconds += time.perf_counter() - started

    def _saved(self, request: Request, key: str) -> Snapshot:
        """Saves the request's KV, and gives its pages back.

        The blocks that it reads aren't saved with it: they stay where they are until their pages
        are needed. But a snapshot that may go to a tier has all tokens: there it stays, and blocks
        leave for others.
        """
        prefixes = self.prefixes
        if request.blocks and prefixes.has_tiers:
            slots = self._tide.pool.slots_of(request.pages)[: request.stored]
            snapshot = self._tide.offload(slots, key=key)
            prefixes.release(request)
            return snapshot
        prefixes.withdraw(request)
        own_pages = prefixes.pages_of(request)
        own_count = request.stored - prefixes.token_count_of(request)
        snapshot = self._tide.retract(own_pages, own_count, key=key)
        del request.pages[len(request.pages) - len(own_pages) :]
        prefixes.let_wait(request)
        return snapshot

    def _forget(self, request: Request) -> None:
        """Drops a request's KV, which will be computed again."""
        self.prefixes.forget(request)
        request.lost = max(request.lost, request.stored)
        if request.stored and not self._options.replay:
            request.exact = False
        request.stored = 0

    # ---- giving pages back -----------------------------------------------------------

    def _resume(self) -> None:
        older_wait = False
        for request in self.retracted[:_GAPS_TRIED]:
            if older_wait and not self._admission.may_fill_gaps(request):
                return
            while self._may_resume(request):
                if request.snapshot is None or self._restore(request):
                    self._retracted.remove(request)
                    self._run(request)
                    self.prefixes.read(request)
                    break  # otherwise its KV is lost, so it now needs room for other tokens
            else:
                older_wait = True

    def _may_resume(self, request: Request) -> bool:
        """Whether there is room for a retracted request, for which newer ones are retracted.

        Never retracts an older one.
        """
        if not self._admission.may_resume(request, self._running):
            return False
        while not self._admission.has_room_again(request, self._running):
            newest = self._running[-1]
            if newest.arrival < request.arrival:
                return False
            self.retract(newest)
        return True

    def _restore(self, request: Request) -> bool:
        snapshot = request.snapshot
        assert snapshot is not None, "only a snapshot can be restored"
        try:
            self._bring_back(request, snapshot)
        except (SnapshotDamaged, SnapshotMiss, SlotsLost, ArenaFull) as error:
            self._count(error)
            self._tide.discard(snapshot)
            request.snapshot = None
            self._forget(request)
            return False
        request.snapshot = None
        self.prefixes.share(request)
        self.stats.resumes += 1
        return True

    def _bring_back(self, request: Request, snapshot: Snapshot) -> None:
        """Gives a request the blocks that it read, and its own pages from the snapshot.

        After an error it has none of them, and waits for its blocks as before.
        """
        if not self.prefixes.read_again(request):
            raise SnapshotMiss("a block of the request's first tokens is nowhere any more")
        page_count = self._pages_for(request.stored) - len(request.pages)
        started = time.perf_counter()
        try:
            self.prefixes.blocks.make_room(page_count)
            pages = self._tide.resume(snapshot, page_count, key=request.snapshot_key)
            assert pages is not None, "_may_start counted the free pages"
        except BaseException:
            self.prefixes.let_wait(request)
            raise
        self.stats.restore_seconds += time.perf_counter() - started
        request.pages += pages

    def _count(self, error: KvtideError) -> None:
        if isinstance(error, SlotsLost):
            self.stats.lost += 1
        elif isinstance(error, SnapshotDamaged):
            self.stats.damaged += 1
        else:
            self.stats.missing += 1

    def _read_ahead(self) -> None:
        """Has the KV of those who come next brought to host memory."""
        coming = [*self._retracted[:_READ_AHEAD], *islice(self._waiting, _READ_AHEAD)]
        for request in coming[:_READ_AHEAD]:
            self.prefixes.read_ahead(request)
            if request.snapshot is not None:
                self._tide.read_ahead(request.snapshot)

    def _admit(self) -> None:
        while self._waiting and self._admission.may_start(self._waiting[0], self._running):
            if self._retracted and not self._admission.may_fill_gaps(self._waiting[0]):
                return
            request = self._waiting.popleft()
            self._run(request)
            self.prefixes.read(request)  # now: the room was counted with what others hold

    def _run(self, request: Request) -> None:
        """Puts a request among those that run. One that an earlier run left may be newer."""
        insort(self._running, request, key=lambda other: other.arrival)

    def _next_count(self, request: Request) -> int:
        return request.next_count(self._options.chunk_tokens, replay=self._options.replay)

    def _pages_for(self, token_count: int) -> int:
        return -(-token_count // self._page_size)
