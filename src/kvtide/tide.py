"""Tide: a request's KV, there and back.

offload                                 restore
  find the rows      (pool)               check the target     (seal)
  lease host blocks  (arena)              find the rows        (pool, snapshot)
  gather and seal    (mover, device)      check every span     (mover, before any write)
                                          scatter              (mover, device)
retract                                 resume
  do what offload does                    acquire pages        (pool.slots)
  release the pages  (pool.slots)         restore, and discard the snapshot
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar, final

import numpy as np

from kvtide.arena import HostArena, Lease
from kvtide.atomic import take_out
from kvtide.device import Job, drain
from kvtide.errors import KvtideError, LayoutError, SlotError, SnapshotMiss, first_line
from kvtide.form import chunk_sizes
from kvtide.integers import checked_integer, integer_of, integers_of, shown
from kvtide.layout import Ids, RequestRows
from kvtide.pool import PageAllocator, Pool
from kvtide.seal import Seal, Span, ranges_of
from kvtide.snapshot import Snapshot
from kvtide.ticket import Ticket
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
    """Takes token slots of one pool to an arena, and back into any slots of an equal pool.

    `offload`, `restore`, `discard` know slots, and the caller knows who holds them; `retract` and
    `resume` also acquire and release pages at a PageAllocator. `start_offload` and
    `start_restore` return a Ticket at once. After an error that isn't kvtide's own, such as Ctrl-C,
    a call waits until nothing moves on the device, other requests' moves included. Not thread-safe:
    one thread schedules.
    """

    def __init__(self, pool: Pool, arena: HostArena, pages: PageAllocator | None = None) -> None:
        """Raises LayoutError if a row of the pool can't be split to fit a block of the arena."""
        self.pool = pool
        self.arena = arena
        self.stats = TideStats()
        self._pages = pages
        self._mover = Mover(pool)
        self._mover.sections(arena.block_bytes)
        self._geometry = pool.geometry.canonical
        self._pending: list[Ticket[Any]] = []

    # ---- slots: the caller holds them ------------------------------------------------

    def offload(self, slots: Any, *, key: str = "", request: RequestRows = None) -> Snapshot:
        """Copies what `slots` (integers [token]) own to host memory, and seals it.

        `request` is the request's own row, an integer, where the layout has such planes, or its
        rows by their kinds, one for each. Blocks until that is done; the slots may then be reused.
        Raises SlotError for invalid slots or rows, ArenaFull when the arena has no room. After an
        error, or Ctrl-C, nothing is kept of it.
        """
        lease = Lease(self.arena)
        try:
            rows, seal = self._owned(slots, key, request)
            job = self._gather(rows, lease, at_once=True)
            return self._sealed(lease, seal, job.wait())
        except BaseException as error:
            self._give_up(lease, error)
            raise

    def start_offload(
        self, slots: Any, *, key: str = "", request: RequestRows = None
    ) -> Ticket[Snapshot]:
        """Like `offload`, without waiting; the slots must not be written before it is done."""
        lease = Lease(self.arena)
        try:
            rows, seal = self._owned(slots, key, request)
            job = self._gather(rows, lease, at_once=False)

            def succeed(spans: list[list[Span]]) -> Snapshot:
                return self._sealed(lease, seal, spans)

            ticket = Ticket(job, succeed=succeed, fail=lease.release, forget=self._forget)
            return self._track(ticket)
        except BaseException as error:
            self._give_up(lease, error)
            raise

    def _owned(self, slots: Any, key: str, request: RequestRows) -> tuple[list[Ids], Seal]:
        """The rows that `slots` own, for each group of planes, and a seal that has no spans yet."""
        slot_ids = self._checked(slots)
        groups = self.pool.rows_of(slot_ids, request)
        seal = Seal(
            geometry=self._geometry,
            key=key,
            token_count=slot_ids.size,
            tokens=tuple(ranges_of(group.tokens) for group in groups),
            lasts=tuple(ranges_of(group.lasts) for group in groups),
            chunk_bytes=self.arena.block_bytes,
            spans=(),
        )
        return [group.ids for group in groups], seal

    def _gather(self, rows: Sequence[Ids], lease: Lease, *, at_once: bool) -> Job[list[list[Span]]]:
        """Extends `lease`, which has no blocks yet, and submits the copy into its blocks.

        After an error, here or later, the caller releases the lease.
        """
        chunk_bytes = self.arena.block_bytes
        sections = self._mover.sections(chunk_bytes)
        lease.extend(sum(section.chunk_count(rows[section.group].size) for section in sections))
        job = self._mover.gather(
            rows, lease.blocks, chunk_bytes=chunk_bytes, at_once=at_once, owner=lease
        )
        lease.use(job)
        return job

    def _sealed(self, lease: Lease, seal: Seal, spans: Sequence[Sequence[Span]]) -> Snapshot:
        seal = replace(seal, spans=tuple(chain.from_iterable(spans)))
        self.stats.offloads += 1
        self.stats.offloaded_bytes += sum(seal.used_bytes)
        return Snapshot(seal, lease)

    def _checked(self, slots: Any) -> Ids:
        return checked_slots(slots, self.pool.slot_count, self.pool.padding_slots)

    def _give_up(self, lease: Lease, error: BaseException) -> None:
        """Gives back what an offload that ended with `error` had; repeatable."""
        try:
            self._settle_after(error)
        finally:
            lease.release()  # as soon as nothing moves, if that isn't now

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

        Blocks until that is done; the snapshot stays. Raises SlotError; SnapshotMiss if it is of
        another geometry, key or length, or was discarded, or if a token has a row in the snapshot
        and none here. A token that has a row here and none in the snapshot (a window reaches
        farther back here) is a SnapshotMiss too, since its row would keep the bytes that it has,
        which are another request's; `keep_extra_rows` says that this is meant, as nothing reads
        them. Raises SnapshotDamaged if a byte has changed, SlotsLost if the device fails while it
        writes. After SlotsLost the slots may hold neither the old bytes nor the new, and after
        Ctrl-C, or whatever else a signal handler raises: release them, nothing writes there any
        more. After any other error no byte of the pool has changed.
        """
        try:
            rows = self._target_rows(snapshot, slots, key, request, keep_extra_rows)
            self._scatter(snapshot, rows, at_once=True).wait()
            self._count_restore(snapshot)
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

        What can be told at once is raised at once; damage, and slots that are lost, by the ticket.
        Until it is done nobody else gets the snapshot's memory, whatever becomes of the snapshot.
        """
        try:
            rows = self._target_rows(snapshot, slots, key, request, keep_extra_rows)
            job = self._scatter(snapshot, rows, at_once=False)

            def succeed(_: object) -> None:
                self._count_restore(snapshot)

            def forget(ticket: Ticket[None]) -> None:
                self._forget(ticket)
                take_out(snapshot.readers, ticket)

            ticket = Ticket(job, succeed=succeed, forget=forget)
            snapshot.readers.append(ticket)
            return self._track(ticket)
        except BaseException as error:
            self._settle_after(error)
            raise

    def _target_rows(
        self,
        snapshot: Snapshot,
        slots: Any,
        key: str,
        request: RequestRows,
        keep_extra_rows: bool,
    ) -> list[Ids]:
        """The rows that the snapshot goes to, for each group of planes."""
        slot_ids = self._checked(slots)
        snapshot.seal.check_target(self._geometry, key, slot_ids.size)
        snapshot.require_held()
        return [
            snapshot.rows_in(number, group, keep_extra_rows=keep_extra_rows)
            for number, group in enumerate(self.pool.rows_of(slot_ids, request))
        ]

    def _scatter(
        self, snapshot: Snapshot, rows: Sequence[Ids], *, at_once: bool
    ) -> Job[list[list[Span]]]:
        seal, lease = snapshot.seal, snapshot.lease
        try:
            sections = self._mover.sections(seal.chunk_bytes)
        except LayoutError as error:
            raise SnapshotMiss(
                f"snapshot has chunks of {seal.chunk_bytes} bytes, which this pool can't take "
                f"({first_line(error)}); recompute this request"
            ) from error
        seal.check_coverage(chunk_sizes(sections, [group.size for group in rows]))
        job = self._mover.scatter(
            lease.blocks,
            rows,
            chunk_bytes=seal.chunk_bytes,
            spans=seal.spans,
            at_once=at_once,
            owner=lease,
        )
        lease.use(job)
        return job

    def _count_restore(self, snapshot: Snapshot) -> None:
        self.stats.restores += 1
        self.stats.restored_bytes += sum(snapshot.seal.used_bytes)

    def _settle_after(self, error: BaseException) -> None:
        """Waits until nothing moves: Ctrl-C may end the wait for a move while copying goes on."""
        if not isinstance(error, KvtideError):
            drain(self.pool.device)

    def discard(self, snapshot: Snapshot) -> None:
        """Gives a snapshot's host memory back; waits for restores of it under way. Repeatable."""
        for reader in tuple(snapshot.readers):
            reader.settle()
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
        than the pages hold or a page that isn't held. After an error, or Ctrl-C, the request keeps
        its pages, and nothing is kept of it in the arena.
        """
        books = self._books
        held = books.check_held(pages)
        slots = self.slots_of(held)
        count = integer_of(token_count)
        if count is None or not 0 <= count <= slots.size:
            raise SlotError(
                f"{shown(token_count)} tokens to retract, but {len(held)} pages of "
                f"{self.pool.page_size} hold 0 to {slots.size}"
            )
        lease = Lease(self.arena)
        try:
            rows, seal = self._owned(slots[:count], key, request)
            job = self._gather(rows, lease, at_once=True)
            snapshot = self._sealed(lease, seal, job.wait())
            books.release(held)
            return snapshot
        except BaseException as error:
            books.hold_again(held)
            self._give_up(lease, error)
            raise

    def resume(
        self,
        snapshot: Snapshot,
        page_count: int,
        *,
        key: str = "",
        request: RequestRows = None,
        keep_extra_rows: bool = False,
    ) -> list[int] | None:
        """Acquires `page_count` pages, restores into the first of them, discards the snapshot.

        Returns None, and changes nothing, when fewer pages are free. Raises as `restore` does, and
        SlotError for fewer pages than the snapshot's tokens need. After an error, or Ctrl-C, the
        pages are free again, and the caller still has to discard the snapshot.
        """
        page_count = checked_integer(page_count, "page_count")
        if page_count * self.pool.page_size < snapshot.token_count:
            raise SlotError(
                f"{page_count} pages of {self.pool.page_size} tokens can't hold a snapshot of "
                f"{snapshot.token_count}"
            )
        books, pages, released = self._books, list[int](), list[int]()
        try:
            try:
                if not books.acquire_to(pages, page_count):
                    return None
                slots = self.slots_of(pages)[: snapshot.token_count]
                self.restore(
                    snapshot, slots, key=key, request=request, keep_extra_rows=keep_extra_rows
                )
                released.append(len(snapshot.lease.blocks))
                self.discard(snapshot)
                return pages
            except BaseException as error:
                self._undo_resume(error, pages, snapshot, released)
                raise
        except BaseException as error:
            # Once more: Ctrl-C may have come while another error was being undone.
            self._undo_resume(error, pages, snapshot, released)
            raise

    def _undo_resume(
        self, error: BaseException, pages: list[int], snapshot: Snapshot, released: list[int]
    ) -> None:
        """Frees the pages, and gives the snapshot the blocks back that its lease may have released.

        `released` has their number once they may be released, and is empty before. Repeatable.
        """
        self._settle_after(error)  # what writes the pages must end first
        self._books.give_back(pages)
        for block_count in released:
            snapshot.lease.hold_again(block_count)

    def slots_of(self, pages: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The slots of `pages` in order, int64 [len(pages) * page_size].

        Raises SlotError for a page that the pool hasn't.
        """
        size, ids = self.pool.page_size, integers_of(pages, "page", "page")
        outside = (ids < 0) | (ids >= self.pool.page_count)
        if outside.any():
            bad, last = int(outside.argmax()), self.pool.page_count - 1
            raise SlotError(f"page {ids[bad]} at position {bad} isn't in 0 … {last}")
        return (ids[:, None] * size + np.arange(size)).reshape(-1)

    def close(self) -> None:
        """Waits for all moves under way. The pool, arena and device stay the caller's."""
        for ticket in self._pending[::-1]:
            ticket.settle()
        self._pending.clear()

    def _track(self, ticket: Ticket[T]) -> Ticket[T]:
        self._pending = [other for other in self._pending if not other.done()]
        self._pending.append(ticket)
        return ticket

    def _forget(self, ticket: Ticket[Any]) -> None:
        """Lets go of a ticket whose outcome is known: only the caller still holds it."""
        take_out(self._pending, ticket)

    @property
    def _books(self) -> PageAllocator:
        if self._pages is None:
            raise LayoutError("retract and resume need a page allocator: Tide(pool, arena, pages)")
        return self._pages
