"""Tide: a request's KV, there and back.

retract                                 resume
  offload                                 restore
    lease host blocks  (arena)              check the seal       (snapshot)
    plan the chunks    (transfer.plan)      check every chunk    (mover, no write before)
    gather and seal    (mover, device)      scatter              (mover, device)
  release the pages    (pool.slots)       snapshot discarded, its blocks free again
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np

from kvtide.arena import HostArena
from kvtide.device import Step
from kvtide.errors import KvtideError, LayoutError, SlotError
from kvtide.integers import checked_integer, integer_of, integers_of, shown
from kvtide.layout import RequestRows
from kvtide.pool import PageAllocator, Pool
from kvtide.snapshot import Seal, Snapshot, Ticket, ranges_of
from kvtide.transfer import Mover, checked_slots

T = TypeVar("T")


@final
@dataclass(slots=True)
class TideStats:
    """What moved so far, counted when it has arrived."""

    offloads: int = 0
    restores: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@final
class Tide:
    """Takes token slots of one pool to an arena, and back into any slots of such a pool.

    `offload`, `restore`, `discard` know slots and leave it to the caller who holds them;
    `retract` and `resume` also keep the books of a PageAllocator. The `start_` forms return
    a Ticket at once. Not thread-safe: one thread schedules.
    """

    def __init__(self, pool: Pool, arena: HostArena, pages: PageAllocator | None = None) -> None:
        """Raises LayoutError if a row of the pool can't be cut to fit a block of the arena."""
        self.pool = pool
        self.arena = arena
        self.stats = TideStats()
        self._pages = pages
        self._mover = Mover(pool)
        self._mover.sections(arena.block_bytes)
        self._pending: list[Ticket[Any]] = []

    # ---- slots: the caller holds them ------------------------------------------------

    def offload(self, slots: Any, *, key: str = "", request: RequestRows = None) -> Snapshot:
        """Copies what `slots` (integers [token]) own to host memory, and seals it.

        `request` is the request's own row, an integer, where the layout has such planes, or its
        rows by their kinds, one for each. Blocks until that is done; the slots may then be reused.
        Raises SlotError for slots or rows that can't be meant, ArenaFull when the arena has no
        room: nothing was taken then.
        """
        ticket: Ticket[Snapshot] | None = None
        try:
            ticket = self._offload(slots, key, request, at_once=True)
            return ticket.wait()
        except BaseException as error:
            self._settle_after(error)
            if ticket is not None:
                with suppress(Exception):
                    self.discard(ticket.wait())  # nobody else will fetch it
            raise

    def start_offload(
        self, slots: Any, *, key: str = "", request: RequestRows = None
    ) -> Ticket[Snapshot]:
        """Like `offload`, without waiting; the slots must not be written before it is done."""
        return self._offload(slots, key, request, at_once=False)

    def _offload(
        self, slots: Any, key: str, request: RequestRows, *, at_once: bool
    ) -> Ticket[Snapshot]:
        slot_ids = checked_slots(slots, self.pool.slot_count, self.pool.padding_slots)
        chunk_bytes = self.arena.block_bytes
        groups = self.pool.rows_of(slot_ids, request)
        rows = [group.ids for group in groups]
        lease = self.arena.lease(self._mover.chunk_count(rows, chunk_bytes))

        def succeed(checksums: list[int]) -> Snapshot:
            self.stats.offloads += 1
            self.stats.offloaded_bytes += self._mover.size_bytes(rows)
            fingerprint = self.pool.geometry.fingerprint
            tokens = tuple(ranges_of(group.tokens) for group in groups)
            lasts = tuple(ranges_of(group.lasts) for group in groups)
            sums = tuple(checksums)
            seal = Seal(fingerprint, key, slot_ids.size, tokens, chunk_bytes, sums, lasts)
            return Snapshot(seal, lease)

        try:
            job = self._mover.gather(rows, lease.blocks, chunk_bytes=chunk_bytes, at_once=at_once)
            return self._track(Ticket(job, succeed=succeed, fail=lease.release))
        except BaseException as error:
            self._settle_after(error)
            lease.release()
            raise

    def restore(
        self,
        snapshot: Snapshot,
        slots: Any,
        *,
        key: str = "",
        request: RequestRows = None,
        keep_extra_rows: bool = False,
    ) -> None:
        """Writes a snapshot's bytes to `slots` (integers [token], as many as its tokens).

        Blocks until that is done; the snapshot stays. Raises SlotError; SnapshotMiss if it
        is of another geometry, key or length, or was discarded, or if a token has a row in the
        snapshot and none here. A token that has a row here and none in the snapshot (a window
        reaches farther back here) is a SnapshotMiss too, since its row would keep the bytes that
        it has, another request's; `keep_extra_rows` says that this is meant, as nothing reads
        them. Raises SnapshotDamaged if a byte has changed. After an error no byte
        of the pool has changed. After Ctrl-C, or whatever else a signal's handler raises, some may
        have, or all, and none changes any more.
        """
        try:
            ticket = self._restore(
                snapshot, slots, key, request, at_once=True, keep_extra_rows=keep_extra_rows
            )
            ticket.wait()
        except BaseException as error:
            self._settle_after(error)
            raise

    def start_restore(
        self,
        snapshot: Snapshot,
        slots: Any,
        *,
        key: str = "",
        request: RequestRows = None,
        keep_extra_rows: bool = False,
    ) -> Ticket[None]:
        """Like `restore`, without waiting; the slots must not be read before it is done.

        What can be told at once is raised at once; damage is raised by the ticket.
        """
        return self._restore(
            snapshot, slots, key, request, at_once=False, keep_extra_rows=keep_extra_rows
        )

    def _restore(
        self,
        snapshot: Snapshot,
        slots: Any,
        key: str,
        request: RequestRows,
        *,
        at_once: bool,
        keep_extra_rows: bool,
    ) -> Ticket[None]:
        slot_ids = checked_slots(slots, self.pool.slot_count, self.pool.padding_slots)
        fingerprint = self.pool.geometry.fingerprint
        snapshot.check(fingerprint=fingerprint, key=key, token_count=slot_ids.size)
        rows = [
            snapshot.rows_in(number, group, keep_extra_rows=keep_extra_rows)
            for number, group in enumerate(self.pool.rows_of(slot_ids, request))
        ]

        def succeed(_: list[int]) -> None:
            self.stats.restores += 1
            self.stats.restored_bytes += self._mover.size_bytes(rows)

        try:
            job = self._mover.scatter(
                snapshot.lease.blocks,
                rows,
                chunk_bytes=snapshot.seal.chunk_bytes,
                checksums=snapshot.seal.checksums,
                at_once=at_once,
            )
            ticket = self._track(Ticket(job, succeed=succeed))
            snapshot.readers = [reader for reader in snapshot.readers if not reader.done()]
            snapshot.readers.append(ticket)
        except BaseException as error:
            self._settle_after(error)
            raise
        return ticket

    def _settle_after(self, error: BaseException) -> None:
        """Waits until nothing moves, where an error may have ended the wait alone, as Ctrl-C does.

        A job ends after all that were queued before it; those of nobody's ticket are among them.
        """
        if not isinstance(error, KvtideError):
            with suppress(Exception):  # of a device that takes no more jobs
                self.pool.device.submit(list[Sequence[Step[None]]]).wait()

    def discard(self, snapshot: Snapshot) -> None:
        """Gives a snapshot's host memory back; waits for restores of it under way. Repeatable."""
        while snapshot.readers:
            snapshot.readers.pop().settle()
        snapshot.lease.release()

    # ---- requests: the page allocator holds their slots -------------------------------

    def retract(
        self,
        pages: Sequence[int],
        token_count: int,
        *,
        key: str = "",
        request: RequestRows = None,
    ) -> Snapshot:
        """Offloads the first `token_count` tokens of a request's pages, then releases the pages.

        `request` is its own row, where the layout has such planes; who holds that row is the
        caller's affair. Raises ArenaFull when the arena has no room, SlotError for more tokens
        than the pages hold or a page that isn't held. After an error the request keeps its pages,
        and nothing is kept of it in the arena.
        """
        books, slots = self._books, self.slots_of(pages)
        count = integer_of(token_count)
        if count is None or not 0 <= count <= slots.size:
            raise SlotError(
                f"{shown(token_count)} tokens to retract, but {len(pages)} pages of "
                f"{self.pool.page_size} hold 0 to {slots.size}"
            )
        snapshot = self.offload(slots[:count], key=key, request=request)
        try:
            books.release(pages)
        except SlotError:
            self.discard(snapshot)
            raise
        return snapshot

    def resume(
        self,
        snapshot: Snapshot,
        page_count: int,
        *,
        key: str = "",
        request: RequestRows = None,
        keep_extra_rows: bool = False,
    ) -> list[int] | None:
        """Acquires `page_count` pages, restores a request into the first of them, discards it.

        None, and nothing changed, when fewer pages are free. Raises as `restore` does, and
        SlotError for fewer pages than the snapshot's tokens need; the pages are free again
        then, and the snapshot is still the caller's to discard.
        """
        page_count = checked_integer(page_count, "page_count")
        if page_count * self.pool.page_size < snapshot.token_count:
            raise SlotError(
                f"{page_count} pages of {self.pool.page_size} tokens can't hold a snapshot of "
                f"{snapshot.token_count}"
            )
        pages = self._books.acquire(page_count)
        if pages is None:
            return None
        try:
            slots = self.slots_of(pages)[: snapshot.token_count]
            self.restore(snapshot, slots, key=key, request=request, keep_extra_rows=keep_extra_rows)
        except BaseException:
            # An interrupt may have ended the wait alone: what writes the pages must end first.
            self.close()
            self._books.release(pages)
            raise
        self.discard(snapshot)
        return pages

    def slots_of(self, pages: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The slots of `pages` in order, int64 [len(pages) * page_size].

        Raises SlotError for a page that the pool hasn't.
        """
        size, ids = self.pool.page_size, integers_of(pages, "page", "page")
        outside = (ids < 0) | (ids >= self.pool.page_count)
        if outside.any():
            at = int(outside.argmax())
            last = self.pool.page_count - 1
            raise SlotError(f"page {ids[at]} at position {at} isn't in 0 … {last}")
        return (ids[:, None] * size + np.arange(size)).reshape(-1)

    def close(self) -> None:
        """Waits for all moves under way. The pool, arena and device stay the caller's."""
        while self._pending:
            self._pending[-1].settle()
            self._pending.pop()

    def _track(self, ticket: Ticket[T]) -> Ticket[T]:
        self._pending = [other for other in self._pending if not other.done()]
        self._pending.append(ticket)
        return ticket

    @property
    def _books(self) -> PageAllocator:
        if self._pages is None:
            raise LayoutError("retract and resume need a page allocator: Tide(pool, arena, pages)")
        return self._pages
