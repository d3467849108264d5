"""PageMoves: the pages of a call, several at a time, between SGLang's memory and the tiers.

    put   copy the page → seal the copy → put it into the first tier that takes it
    get   get it from a tier and verify it → copy it to SGLang's page

SGLang gives a page's memory to other KV once its call has returned, and a call returns before its
deadline, whatever a disk does. So tiers never see SGLang's memory. Each thread here has memory of
its own, and touches a page only while it is lent, which ends with the call. A read that ends too
late is dropped; a write that ends too late has written what the page held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, final

import torch
import xxhash

from kvtide.device.threads import QueuedJob, Threads
from kvtide.errors import KvtideError, SnapshotDamaged, SnapshotMiss, TierFull, TierRetry
from kvtide.plugin.sglang.hicache.pages import HostPage, HostPages
from kvtide.seal import Seal, Span
from kvtide.tier.base import Tier
from kvtide.tier.file_form import ALIGNMENT, padded

logger = logging.getLogger(__name__)

T = TypeVar("T")

READS_AT_ONCE = 8
WRITES_AT_ONCE = 16
"""Each write waits until its file lasts. A file system makes all files last together that wait."""
_KEYS_A_JOB = 64
_GLANCE_S = 0.05
"""How long a call waits before it looks whether it should end early."""

HIT, MISS, DAMAGED = "hit", "miss", "damaged"
WRITTEN, PRESENT, FULL = "written", "present", "full"
RETRY, LATE, ERROR = "retry", "late", "error"
OUTCOMES = (HIT, MISS, DAMAGED, WRITTEN, PRESENT, FULL, RETRY, LATE, ERROR)
"""What may become of a page: read; not there; its bytes were wrong; written; there already; no
tier has room; no tier answers; not before the deadline; an error of kvtide's."""


class _NotLent(Exception):
    """The call that lent the page has returned."""


@final
class PageMove:
    """A page on its way to a tier or from it."""

    def __init__(
        self, key: str, name: str, pages: HostPages, page: HostPage, tiers: Sequence[Tier]
    ) -> None:
        """`key` is the page's in the tiers, `name` is SGLang's, a hash of its tokens."""
        self.key = key
        self.name = name
        self.pages = pages
        self.tiers = tiers
        self._page: HostPage | None = page
        self._turn = threading.Lock()

    @contextmanager
    def lent(self) -> Iterator[HostPage]:
        """Within, the page's memory is the page's. Raises _NotLent once the call has returned."""
        with self._turn:
            if self._page is None:
                raise _NotLent
            yield self._page

    def end(self) -> None:
        """Nobody touches the page's memory from now on. Waits while somebody copies."""
        with self._turn:
            self._page = None

    def sealed(self, room: memoryview) -> Seal:
        """A seal of the page, whose bytes are in `room`."""
        checksum = xxhash.xxh3_64_intdigest(room)
        spans = (Span(0, 0, room.nbytes, checksum),) if room.nbytes else ()
        rows = self.pages.row_count
        return Seal(self.pages.geometry, self.name, rows, (), (), max(1, room.nbytes), spans)

    def chunks(self, room: memoryview) -> list[memoryview]:
        """The page's bytes as a snapshot has them: a chunk, or none for an empty page."""
        return [room] if room.nbytes else []

    def make_room(self, room: memoryview, seal: Seal) -> list[memoryview]:
        """Gives `room` for the page with that seal. Raises SnapshotMiss for another page's."""
        seal.check_target(self.pages.geometry, self.name, self.pages.row_count)
        seal.check_coverage([room.nbytes] if room.nbytes else [])
        return self.chunks(room)


@final
class PageMoves:
    """Moves pages in threads of its own. Each call ends `deadline_s` after its beginning."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Two queues, so that reads don't wait behind writes.
        self._readers = Threads(READS_AT_ONCE, "kvtide-hicache-read", patience_s=deadline_s)
        self._writers = Threads(WRITES_AT_ONCE, "kvtide-hicache-write", patience_s=deadline_s)
        self._memory = _Memory()
        self._change = threading.Lock()
        self._late: list[QueuedJob[Any]] = []
        """Jobs of calls that returned without them."""
        self._hurry = threading.Event()

    def get(self, moves: Sequence[PageMove]) -> list[str]:
        """Fills the pages from their tiers; gives an outcome for each. Only HIT has its bytes."""
        return self._do(self._readers, self._get, moves)

    def put(self, moves: Sequence[PageMove]) -> list[str]:
        """Puts the pages into their tiers; gives an outcome for each."""
        return self._do(self._writers, self._put, moves)

    def find(self, keys: Sequence[str], tiers: Sequence[Tier]) -> list[bool]:
        """Whether each key probably has a page in a tier."""
        places = range(0, len(keys), _KEYS_A_JOB)
        parts = [keys[place : place + _KEYS_A_JOB] for place in places]
        answers = self._run(self._readers, [partial(_find, part, tiers) for part in parts])
        found = (
            [False] * len(part) if answer is None else answer
            for part, answer in zip(parts, answers, strict=True)
        )
        return [is_there for part in found for is_there in part]

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Within, calls don't wait: what hasn't ended is too late."""
        self._hurry.set()
        try:
            yield
        finally:
            self._hurry.clear()

    def close(self) -> None:
        """Ends the threads, and leaves those that wait for a tier that hangs. Repeatable."""
        self._readers.close()
        self._writers.close()

    # ---- a call --------------------------------------------------------------------------

    def _do(
        self, threads: Threads, work: Callable[[PageMove], str], moves: Sequence[PageMove]
    ) -> list[str]:
        """The outcomes of all moves. When this returns nobody touches a page's memory any more."""
        calls = [partial(_outcome_of, work, move) for move in moves]
        answers = self._run(threads, calls, moves)
        return [answer or LATE for answer in answers]

    def _run(
        self, threads: Threads, calls: Sequence[Callable[[], T]], lent: Sequence[PageMove] = ()
    ) -> list[T | None]:
        """The results of calls in threads; None for a call that is too late.

        At the deadline the pages that were lent are taken back, and then no result changes.
        """
        jobs: list[QueuedJob[T]] = []
        try:
            # While a call of before is stuck, its threads are all that there are: nobody waits.
            if not self._is_stuck():
                jobs += [threads.start(call) for call in calls]
            until = time.monotonic() + self._deadline_s
            all(self._settled(job, until) for job in jobs)
        finally:
            for move in lent:
                move.end()
        return [self._result_of(job) for job in jobs] or [None] * len(calls)

    def _result_of(self, job: QueuedJob[T]) -> T | None:
        if job.cancel():
            return None
        if not job.done():
            with self._change:
                self._late.append(job)
            return None
        return job.wait()

    def _settled(self, job: QueuedJob[Any], until: float) -> bool:
        """Waits for a job until that time, or until there is a hurry; whether it has ended."""
        while not job.done():
            left = until - time.monotonic()
            if left <= 0 or self._hurry.is_set():
                return False
            job.settle(min(left, _GLANCE_S))
        return True

    def _is_stuck(self) -> bool:
        """Whether a job of an earlier call hasn't ended yet."""
        with self._change:
            self._late = [job for job in self._late if not job.done()]
            return bool(self._late)

    # ---- in a thread ---------------------------------------------------------------------

    def _put(self, move: PageMove) -> str:
        if any(_holds(tier, move.key) for tier in move.tiers):
            return PRESENT
        room, address = self._memory.room(move.pages.size_bytes)
        with move.lent() as page:
            page.copy_to(address)
        seal = move.sealed(room)
        outcome = RETRY
        for tier in move.tiers:
            try:
                tier.put(move.key, seal, move.chunks(room))
                return WRITTEN
            except TierFull:
                outcome = FULL
            except TierRetry:
                continue
        return outcome

    def _get(self, move: PageMove) -> str:
        room, address = self._memory.room(move.pages.size_bytes)
        outcome = MISS
        for tier in move.tiers:
            try:
                tier.get(move.key, partial(move.make_room, room))
            except SnapshotMiss:
                continue
            except SnapshotDamaged as error:
                logger.warning("kvtide drops a damaged page of KV: %s", error)
                outcome = DAMAGED
            except TierRetry:
                outcome = RETRY if outcome == MISS else outcome
            else:
                with move.lent() as page:
                    page.copy_from(address)
                return HIT
        return outcome


def _outcome_of(work: Callable[[PageMove], str], move: PageMove) -> str:
    try:
        return work(move)
    except _NotLent:
        return LATE
    except Exception:
        logger.exception("kvtide couldn't move a page of KV")
        return ERROR


def _find(keys: Sequence[str], tiers: Sequence[Tier]) -> list[bool]:
    return [any(_holds(tier, key) for tier in tiers) for key in keys]


def _holds(tier: Tier, key: str) -> bool:
    try:
        return tier.contains(key)
    except KvtideError:
        return False


class _Memory(threading.local):
    """Memory of a thread's own, which stays where it is: a tier may register it once for all."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)

    def room(self, size_bytes: int) -> tuple[memoryview, int]:
        """`size_bytes` for direct I/O, and their address; valid until the next call."""
        needed = padded(size_bytes) + ALIGNMENT
        if self._whole.nbytes < needed:
            self._whole = torch.empty(needed, dtype=torch.uint8)
        first = -self._whole.data_ptr() % ALIGNMENT
        room = self._whole[first : first + size_bytes]
        array: Any = room.numpy()
        return memoryview(array), self._whole.data_ptr() + first
