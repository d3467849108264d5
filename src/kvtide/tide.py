"""Tide: moves a request's KV to host memory and back.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar, final

from kvtide.arena import Charge, HostArena, Lease
from kvtide.atomic import take_out
from kvtide.device import Job, drain
from kvtide.errors import KvtideError, LayoutError, SlotError, SnapshotMiss, first_line
from kvtide.form import chunk_sizes
from kvtide.integers import checked_integer, integer_of, shown
from kvtide.layout import Ids, RequestRows
from kvtide.pool import PageAllocator, Pool
from kvtide.seal import Seal, Span, ranges_of
from kvtide.snapshot import Snapshot, charge_for
from kvtide.ticket import Ticket
from kvtide.tier import Spill
from kvtide.transfer import Mover

T = TypeVar("T")

_Spans = Sequence[Sequence[Span]]


@final
@dataclass(slots=True)
class TideStats:
    """Counts of moves that have ended, and their bytes."""

    offloads: int = 0
    restores: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


@final
class Tide:
    """Moves token slots of a pool to an arena, and back into any slots of such a pool.

    `offload`, `restore` and `discard` take slots; the caller must hold them. `retract` and `resume`
    also release and acquire pages of a PageAllocator. The `start_` forms return a Ticket at once.
    After an error that isn't a KvtideError, such as Ctrl-C, a call waits until all jobs of the
    device have ended, those of other requests included. Not thread-safe: one thread schedules.
    """

    def __init__(
        self,
        pool: Pool,
        arena: HostArena,
        pages: PageAllocator | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Raises LayoutError if a row of the pool can't be split to fit a block of the arena.

        With the `spill` of the arena, snapshots for which the arena has no room go to its tiers.
        """
        self.pool = pool
        self.arena = arena
        self._spill = spill
        self.stats = TideStats()
        self._pages = pages
        self._mover = Mover(pool)
        self._mover.sections(arena.block_bytes)
        self._geometry = pool.geometry.canonical
        self._pending: list[Ticket[Any]] = []

    # ---- slots: the caller holds them ------------------------------------------------

    def offload(self, slots: Any, *, key: str = "", request: RequestRows = None) -> Snapshot:
        """Copies the rows of `slots` (integers [token]) to host memory, and seals them.

        `request` is the row of the request, an integer, if the layout has planes of requests, or
        its rows by their kinds. Blocks until the copy is done; the slots may then be reused. Raises
        SlotError for invalid slots or rows, ArenaFull if the arena has no room. After an error or
        Ctrl-C nothing is kept in the arena.
        """
        lease = Lease(self.arena)
        try:
            return self._offloaded(slots, key, request, lease)
        except BaseException as error:
            self._give_up(lease, error)
            raise

    def start_offload(
        self, slots: Any, *, key: str = "", request: RequestRows = None
    ) -> Ticket[Snapshot]:
        """Like `offload`, but doesn't wait. Don't write the slots before the ticket is done."""
        lease = Lease(self.arena)
        try:
            job, succeed = self._begin(slots, key, request, lease, at_once=False)
            ticket = Ticket(job, succeed=succeed, fail=lease.release, forget=self._forget)
            return self._track(ticket)
        except BaseException as error:
            self._give_up(lease, error)
            raise

    def _offloaded(self, slots: Any, key: str, request: RequestRows, lease: Lease) -> Snapshot:
        job, succeed = self._begin(slots, key, request, lease, at_once=True)
        return succeed(job.wait())

    def _begin(
        self, slots: Any, key: str, request: RequestRows, lease: Lease, *, at_once: bool
    ) -> tuple[Job[_Spans], Callable[[_Spans], Snapshot]]:
        """Starts the copy into an empty lease, which the caller releases after an error.

        The second result makes the snapshot of the job's result, the spans of each task.
        """
        slots = self.pool.checked(slots)
        rows = self.pool.rows_of(slots, request)
        tokens, lasts = (
            tuple(map(ranges_of, numbers))
            for numbers in ([group.tokens for group in rows], [group.lasts for group in rows])
        )
        ids, chunk_bytes = [group.ids for group in rows], self.arena.block_bytes
        seal = Seal(self._geometry, key, slots.size, tokens, lasts, chunk_bytes, spans=())
        block_count = self._mover.chunk_count(ids, chunk_bytes)
        charge = charge_for(self.arena, seal, block_count)
        if self._spill is not None:
            self._spill.make_room(block_count)
        lease.extend(block_count)
        job = self._mover.gather(
            ids, lease.blocks, chunk_bytes=chunk_bytes, at_once=at_once, owner=lease
        )
        lease.use(job)
        return job, partial(self._sealed, seal, lease, charge)

    def _sealed(self, seal: Seal, lease: Lease, charge: Charge, spans: _Spans) -> Snapshot:
        """The snapshot of rows whose copy has ended."""
        seal = replace(seal, spans=tuple(chain.from_iterable(spans)))
        self.stats.offloads += 1
        self.stats.offloaded_bytes += sum(seal.used_bytes)
        snapshot = Snapshot(seal, lease, charge=charge)
        if self._spill is not None:
            self._spill.add(snapshot)
        return snapshot

    def _give_up(self, lease: Lease, error: BaseException) -> None:
        """Releases the lease of an offload that ended with `error`. Repeatable."""
        try:
            self._settle_after(error)
        finally:
            lease.release()  # if a job still uses the blocks, they are free when it ends

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

        Blocks until the copy is done; the snapshot stays valid. Raises SlotError for invalid slots
        or rows. Raises SnapshotMiss if the snapshot has another geometry, key or length, was
        discarded, or has a row for a token that has none here. A token may also have a row here and
        none in the snapshot, if a window reaches farther back here. That row would keep the bytes
        of another request, so this is a SnapshotMiss, too, unless `keep_extra_rows` says that
        nothing reads such rows.

        Raises SnapshotDamaged if a byte has changed, SlotsLost if the device fails while it writes.
        After SlotsLost, and after Ctrl-C, the slots may hold neither the old bytes nor the new, and
        nothing writes them any more: release them. After any other error no byte of the pool has
        changed.
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
        """Like `restore`, but doesn't wait. Don't read the slots before the ticket is done.

        The ticket raises SnapshotDamaged and SlotsLost; this call raises the other errors. The
        snapshot's memory isn't reused before the ticket is done, even if the snapshot is discarded.
        """
        try:
            rows = self._target_rows(snapshot, slots, key, request, keep_extra_rows)
            job = self._scatter(snapshot, rows, at_once=False)
            succeed = partial(self._count_restore, snapshot)
            forget = partial(self._forget_reader, snapshot)
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
        """The rows to which the snapshot is restored, for each group of planes."""
        slots = self.pool.checked(slots)
        snapshot.seal.check_target(self._geometry, key, slots.size)
        if self._spill is not None:
            self._spill.require(snapshot)
        snapshot.require_here()
        rows = self.pool.rows_of(slots, request)
        return [
            snapshot.rows_in(number, group, keep_extra_rows=keep_extra_rows)
            for number, group in enumerate(rows)
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

    def _count_restore(self, snapshot: Snapshot, _: object = None) -> None:
        self.stats.restores += 1
        self.stats.restored_bytes += sum(snapshot.seal.used_bytes)

    def _settle_after(self, error: BaseException) -> None:
        """Waits until no job runs: Ctrl-C may end the wait for a job while the job goes on."""
        if not isinstance(error, KvtideError):
            drain(self.pool.device)

    def discard(self, snapshot: Snapshot) -> None:
        """Waits for restores of a snapshot, and gives its host memory back. Repeatable."""
        for reader in tuple(snapshot.readers):
            reader.settle()
        if self._spill is not None:
            self._spill.remove(snapshot)
        snapshot.lease.release()

    def read_ahead(self, snapshot: Snapshot) -> bool:
        """Begins to bring a snapshot that is wanted soon back from its tier. Doesn't block.

        Whether a restore would not wait for a tier now.
        """
        return self._spill is None or self._spill.read_ahead(snapshot)

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

        `request` is the row of the request if the layout has planes of requests; the caller holds
        that row. Raises ArenaFull if the arena has no room, SlotError for more tokens than the
        pages hold and for a page that isn't held. After an error or Ctrl-C the request keeps its
        pages, and nothing is kept in the arena.
        """
        books = self._books
        held = books.check_held(pages)
        slots = self.pool.slots_of(held)
        count = integer_of(token_count)
        if count is None or not 0 <= count <= slots.size:
            raise SlotError(
                f"{shown(token_count)} tokens to retract, but {len(held)} pages of "
                f"{self.pool.page_size} hold 0 to {slots.size}"
            )
        lease = Lease(self.arena)
        try:
            snapshot = self._offloaded(slots[:count], key, request, lease)
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
        """Acquires `page_count` pages, restores the snapshot into the first, and discards it.

        Returns the pages, or None, without any change, if fewer pages are free. Raises the errors
        of `restore`, and SlotError if the pages are too few for the snapshot's tokens. After an
        error or Ctrl-C the pages are free again, and the snapshot isn't discarded.
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
                slots = self.pool.slots_of(pages)[: snapshot.token_count]
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
            # Again, since Ctrl-C may have come in the handler of another error.
            self._undo_resume(error, pages, snapshot, released)
            raise

    def _undo_resume(
        self, error: BaseException, pages: list[int], snapshot: Snapshot, released: list[int]
    ) -> None:
        """Frees the pages; undoes the snapshot's release if `released` has its block count.

        Repeatable.
        """
        self._settle_after(error)  # the job that writes the pages must end first
        self._books.give_back(pages)
        for block_count in released:
            snapshot.lease.hold_again(block_count)

    def close(self) -> None:
        """Waits for all moves. Doesn't close the pool, the arena or the device."""
        for ticket in self._pending[::-1]:
            ticket.settle()
        self._pending.clear()

    def _track(self, ticket: Ticket[T]) -> Ticket[T]:
        self._pending = [other for other in self._pending if not other.done()]
        self._pending.append(ticket)
        return ticket

    def _forget(self, ticket: Ticket[Any]) -> None:
        """Drops a ticket whose outcome is known, and so the memory that it holds."""
        take_out(self._pending, ticket)

    def _forget_reader(self, snapshot: Snapshot, ticket: Ticket[Any]) -> None:
        self._forget(ticket)
        take_out(snapshot.readers, ticket)

    @property
    def _books(self) -> PageAllocator:
        if self._pages is None:
            raise LayoutError("retract and resume need a page allocator: Tide(pool, arena, pages)")
        return self._pages
