"""Spill: moves snapshots from an arena to tiers when it fills, those used least recently first.

Each snapshot is in one of four states:

    here       in the arena alone: it must be written before its memory can be given away
    written    in the arena and in a tier: its memory can be given away at once
    below      in a tier alone
    lost       nowhere: no tier gave it back, so its request must be computed again

Once the arena is fuller than its high mark, snapshots are written in the background, so that a
caller who needs room needn't wait. Only this module waits for tiers and counts what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import final

from kvtide.arena import HostArena, Lease
from kvtide.errors import (
    KvtideError,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    first_line,
    to_keep,
    to_raise,
)
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot, chunk_views
from kvtide.tier.base import Tier
from kvtide.tier.entry import SpillEntry, SpillStats
from kvtide.tier.retries import REST_S, RetriedTier
from kvtide.tier.workers import ThreadWorkers, Workers

_WRITES_AT_ONCE = 2
_THREADS = _WRITES_AT_ONCE + 1  # a read doesn't wait for writes


@final
class Spill:
    """The books of an arena's snapshots. Not thread-safe: one thread schedules."""

    def __init__(
        self,
        arena: HostArena,
        tiers: Sequence[Tier],
        *,
        name_of: Callable[[str], str | None] = lambda _: None,
        high_mark: float = 0.75,
        deadline_s: float = 60.0,
        workers: Workers | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`tiers` are asked in order. `name_of` gives the name that a snapshot has in them, by the
        key of its seal, so that another process can find it; None for a name that nobody finds.

        Above the share `high_mark` of the arena's blocks snapshots are written in advance. A caller
        waits for a move at most `deadline_s`; then it counts as failed, and its memory is free when
        it ends.
        """
        self.stats = SpillStats()
        self._arena = arena
        self._clock = clock
        self._tiers = [RetriedTier(tier, clock=clock, sleep=sleep) for tier in tiers]
        self._name_of = name_of
        self._prefix = token_hex(16)
        self._count = 0
        self._high_blocks = int(high_mark * arena.block_count)
        self._deadline_s = deadline_s
        self._workers = workers or ThreadWorkers(_THREADS)
        self._entries: dict[int, SpillEntry] = {}
        """By the snapshots' ids; the least recently used snapshot first."""
        self._moving: list[SpillEntry] = []
        self._is_left = False

    def add(self, snapshot: Snapshot) -> None:
        """Takes a new snapshot into the books, as used last. The caller must `remove` it."""
        self._count += 1
        name = self._name_of(snapshot.seal.key) or f"{self._prefix}/{self._count}"
        self._entries[id(snapshot)] = SpillEntry(snapshot, name)
        self.settle()
        self._write_in_advance()

    def find(self, name: str) -> Snapshot | None:
        """Finds a snapshot that another process left in a tier, and takes it into the books."""
        for tier in self._tiers:
            with suppress(KvtideError):
                if tier.contains(name):
                    seal = tier.seal_of(name)
                    lease = Lease(self._arena)
                    lease.release()
                    snapshot = Snapshot(seal, lease, is_below=True)
                    entry = self._entries[id(snapshot)] = SpillEntry(snapshot, name)
                    entry.tier = tier
                    return snapshot
        return None

    def leave(self) -> int:
        """Writes all snapshots to tiers, where they stay: `find` in a later process finds them.

        Waits for that, and returns how many there are. Those that no tier takes are lost with the
        arena.
        """
        self._is_left = True
        while self._write_one():
            pass
        return sum(entry.tier is not None for entry in self._entries.values())

    def make_room(self, block_count: int) -> None:
        """Frees blocks of the arena until `block_count` are free, or no more can be freed.

        Waits for tiers if need be. The lease that the caller takes says whether it was enough.
        """
        self.settle()
        if block_count > self._arena.block_count:
            return
        while self._arena.free_count < block_count and self._free_one():
            pass

    def read_ahead(self, snapshot: Snapshot) -> None:
        """Says that a snapshot is wanted soon: begins to read it if there is room at once."""
        self.settle()
        entry = self._used(snapshot)
        if entry is None or entry.is_here or entry.room is not None or entry.error is not None:
            return
        others = [other for other in self._entries.values() if not other.was_read_ahead]
        written = (other for other in others if other.tier is not None and other.may_leave)
        while self._arena.free_count < entry.block_count:
            other = next(written, None)
            if other is None:
                return
            other.give_away()
        self._read(entry)

    def require(self, snapshot: Snapshot) -> None:
        """Brings a snapshot back to the arena, and waits for that.

        Raises SnapshotMiss or SnapshotDamaged if no tier gives it back, ArenaFull.
        """
        self.settle()
        entry = self._used(snapshot)
        if entry is None:
            return
        self.stats.reads_in_time += entry.was_read_ahead
        entry.was_read_ahead = False
        if not entry.is_here and entry.room is None and entry.error is None:
            self.make_room(entry.block_count)
            self._read(entry)
        if entry.room is not None:
            self._wait_for(entry)
            entry.was_read_ahead = False
        if entry.error is not None:
            raise to_raise(entry.error)

    def remove(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot, in the tiers too. Its lease stays the caller's. Repeatable."""
        entry = self._entries.pop(id(snapshot), None)
        if entry is None:
            return
        snapshot.is_below = False
        if entry.room is not None:
            entry.room.release()
            entry.room = None
        if entry.job is None:  # otherwise it is removed when the move has ended
            self._remove_below(entry)

    def settle(self) -> None:
        """Notes which moves have ended. Doesn't block."""
        for entry in tuple(self._moving):
            if entry.job is not None and entry.job.done():
                self._note_end(entry)

    def close(self) -> None:
        """Waits for all moves. Closes neither the arena nor the tiers. Repeatable."""
        for entry in tuple(self._moving):
            if entry.job is not None:
                self._workers.settle(entry.job, self._deadline_s)
        self.settle()
        self._workers.close()

    def _used(self, snapshot: Snapshot) -> SpillEntry | None:
        """The entry of a snapshot, which now counts as used last; None if it isn't in the books."""
        entry = self._entries.pop(id(snapshot), None)
        if entry is not None:
            self._entries[id(snapshot)] = entry
        return entry

    # ---- down --------------------------------------------------------------------------

    def _write_in_advance(self) -> None:
        """Begins writes until the rest of what only the arena has is within the high mark."""
        here = [entry for entry in self._entries.values() if entry.is_here and entry.tier is None]
        surplus = sum(entry.block_count for entry in here) - self._high_blocks
        for entry in here:
            if surplus <= 0 or len(self._moving) >= _WRITES_AT_ONCE:
                return
            if entry.is_due(self._clock()):
                self._write(entry)
            surplus -= entry.block_count

    def _free_one(self) -> bool:
        """Gives the least recently used snapshot's memory away, or takes a step towards that.

        May wait for a tier. False if no snapshot can leave.
        """
        now = self._clock()
        # A snapshot that was removed while it moved has memory until the move ends.
        removed = (entry for entry in self._moving if id(entry.snapshot) not in self._entries)
        for entry in (*removed, *self._entries.values()):
            if entry.tier is not None and entry.may_leave:
                entry.give_away()
                return True
            if entry.is_due(now):
                self._write(entry)
            if entry.job is not None and not entry.is_late:
                self._wait_for(entry)
                return True
        return False

    def _write_one(self) -> bool:
        """Waits for a move, or for a write that it begins; False if there is none."""
        self.settle()
        due = [entry for entry in self._entries.values() if entry.is_due(self._clock())][:1]
        for entry in due:
            self._write(entry)
        moving = [entry for entry in self._moving if not entry.is_late][:1]
        for entry in moving:
            self._wait_for(entry)
        return bool(moving)

    def _write(self, entry: SpillEntry) -> None:
        snapshot = entry.snapshot
        work = partial(self._put, entry.key, snapshot.seal, snapshot.chunks)
        entry.job = self._workers.start(work)
        snapshot.lease.use(entry.job)
        self._moving.append(entry)

    def _put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> tuple[RetriedTier, float]:
        """In a worker: the first tier that takes a snapshot, and how long that took."""
        started = self._clock()
        error: KvtideError = TierFull("there is no tier below the arena")
        for tier in self._tiers:
            try:
                tier.put(key, seal, chunks)
                return tier, self._clock() - started
            except KvtideError as refusal:
                error = refusal
        raise error

    # ---- up ----------------------------------------------------------------------------

    def _read(self, entry: SpillEntry) -> None:
        room = Lease(self._arena)
        try:
            room.extend(entry.block_count)
            views = chunk_views(room, entry.snapshot.seal)
            assert entry.tier is not None, "what isn't in the arena is in a tier"
            entry.job = self._workers.start(partial(self._get, entry.tier, entry, views))
            room.use(entry.job)
            entry.room = room
            self._moving.append(entry)
        except BaseException:
            room.release()
            raise

    def _get(
        self, tier: RetriedTier, entry: SpillEntry, views: list[memoryview]
    ) -> tuple[RetriedTier, float]:
        """In a worker: fills `views` with the snapshot's bytes."""
        started, wanted = self._clock(), entry.snapshot.seal

        def make_room(seal: Seal) -> list[memoryview]:
            if seal != wanted:
                raise SnapshotMiss("the tier has another snapshot under this key")
            return views

        tier.get(entry.key, make_room)
        return tier, self._clock() - started

    # ---- both --------------------------------------------------------------------------

    def _wait_for(self, entry: SpillEntry) -> None:
        """Waits for an entry's move and notes its end, or that it is late."""
        assert entry.job is not None, "an entry that moves"
        started = self._clock()
        try:
            if self._workers.settle(entry.job, self._deadline_s):
                self._note_end(entry)
            else:
                entry.is_late = True
                self._note_failure(entry, TimeoutError(f"no answer in {self._deadline_s} s"))
        finally:
            self.stats.waited_seconds += self._clock() - started

    def _note_end(self, entry: SpillEntry) -> None:
        """Notes the end of a move. Its memory is free for other moves."""
        assert entry.job is not None, "an entry that moves"
        try:
            tier, seconds = entry.job.wait()
            self._note_success(entry, tier, seconds)
        except Exception as error:
            if not entry.is_late:
                self._note_failure(entry, error)
        self._moving.remove(entry)
        entry.job, entry.is_late = None, False
        if id(entry.snapshot) not in self._entries:  # it was removed from the books meanwhile
            self._remove_below(entry)

    def _note_success(self, entry: SpillEntry, tier: RetriedTier, seconds: float) -> None:
        size_bytes, stats = sum(entry.snapshot.seal.used_bytes), self.stats
        if entry.tier is None:
            stats.writes += 1
            stats.written_bytes += size_bytes
            stats.write_seconds += seconds
            entry.tier = tier
        elif entry.room is not None:
            stats.reads += 1
            stats.read_bytes += size_bytes
            stats.read_seconds += seconds
            entry.snapshot.lease, entry.room = entry.room, None
            entry.snapshot.is_below = False
            entry.was_read_ahead = True

    def _note_failure(self, entry: SpillEntry, error: Exception) -> None:
        if entry.room is None:
            self.stats.failed_writes += 1
            entry.retry_at = self._clock() + REST_S
            return
        if isinstance(error, SnapshotDamaged):
            self.stats.damaged += 1
            entry.error = to_keep(error)
        else:
            self.stats.missing += 1
            entry.error = SnapshotMiss(
                f"no tier gave a snapshot of {entry.snapshot.token_count} tokens back "
                f"({first_line(error)}); recompute this request"
            )
        entry.room.release()
        entry.room = None

    def _remove_below(self, entry: SpillEntry) -> None:
        if entry.tier is not None and not self._is_left:
            self._workers.start(partial(entry.tier.remove, entry.key))
