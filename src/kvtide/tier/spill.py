"""Spill: moves snapshots from an arena to tiers when it fills, those used least recently first.

Once the arena is fuller than its high mark, snapshots are written in the background, so that a
caller who needs room needn't wait. Only this module waits for tiers and counts what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
from kvtide.tier.counts import SpillStats, TierCounts, reason_of
from kvtide.tier.entry import Move, SpillEntries, SpillEntry, State
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
        self._arena = arena
        self._clock = clock
        self._tiers = [RetriedTier(tier, clock=clock, sleep=sleep) for tier in tiers]
        self.stats = SpillStats(_by_name(self._tiers))
        self._name_of = name_of
        self._prefix = token_hex(16)
        self._count = 0
        self._high_blocks = int(high_mark * arena.block_count)
        self._deadline_s = deadline_s
        self._workers = workers or ThreadWorkers(_THREADS)
        self._entries = SpillEntries()
        self._moving: list[SpillEntry] = []
        self._is_left = False

    def add(self, snapshot: Snapshot) -> None:
        """Takes a new snapshot into the books, as used last. The caller must `remove` it."""
        self._count += 1
        name = self._name_of(snapshot.seal.key) or f"{self._prefix}/{self._count}"
        self._entries.add(SpillEntry(snapshot, name))
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
                    entry = SpillEntry(snapshot, name, State.BELOW)
                    entry.tier = tier
                    self._entries.add(entry)
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
        return self._entries.kept_count()

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
        entry = self._entries.used(snapshot)
        if entry is None or entry.state is not State.BELOW:
            return
        while self._arena.free_count < entry.block_count:
            others = (e for e in self._entries.near.values() if e.may_leave and not e.is_ahead)
            other = next(others, None)
            if other is None:
                return
            self._give_away(other)
        self._read(entry)
        entry.is_ahead = True

    def require(self, snapshot: Snapshot) -> None:
        """Brings a snapshot back to the arena, and waits for that.

        Raises SnapshotMiss or SnapshotDamaged if no tier gives it back, ArenaFull.
        """
        self.settle()
        entry = self._entries.used(snapshot)
        if entry is None:
            return
        if entry.is_ahead:
            self.stats.reads_in_time += entry.state is State.WRITTEN
            self.stats.reads_late += entry.state is State.READING
            entry.is_ahead = False
        if entry.state is State.BELOW:
            self.make_room(entry.block_count)
            self._read(entry)
        if entry.state is State.READING:
            self._wait_for(entry)
        if entry.error is not None:
            raise to_raise(entry.error)

    def remove(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot, in the tiers too. Its lease stays the caller's. Repeatable."""
        entry = self._entries.pop(snapshot)
        if entry is None:
            return
        snapshot.is_below = False
        if entry.move is None:
            self._remove_below(entry)
        elif entry.move.room is not None:  # it is removed below when the move has ended
            entry.move.room.release()

    def settle(self) -> None:
        """Notes which moves have ended. Doesn't block."""
        for entry in tuple(self._moving):
            if entry.move is not None and entry.move.job.done():
                self._note_end(entry, entry.move)

    def close(self) -> None:
        """Waits for all moves. Closes neither the arena nor the tiers. Repeatable."""
        for entry in tuple(self._moving):
            if entry.move is not None:
                self._workers.settle(entry.move.job, self._deadline_s)
        self.settle()
        self._workers.close()

    # ---- down --------------------------------------------------------------------------

    def _write_in_advance(self) -> None:
        """Begins writes until the rest of what only the arena has is within the high mark."""
        surplus = self._entries.unwritten_blocks - self._high_blocks
        for entry in self._entries.near.values():
            if surplus <= 0 or len(self._moving) >= _WRITES_AT_ONCE:
                return
            if entry.is_due(self._clock()):
                self._write(entry)
            surplus -= entry.block_count if entry.is_unwritten else 0

    def _free_one(self) -> bool:
        """Gives the least recently used snapshot's memory away, or takes a step towards that.

        May wait for a tier. False if no snapshot can leave.
        """
        now = self._clock()
        # A snapshot that was removed while it moved has memory until the move ends.
        removed = (entry for entry in self._moving if entry.state is State.REMOVED)
        for entry in (*removed, *self._entries.near.values()):
            if entry.may_leave:
                self._give_away(entry)
                return True
            if entry.is_due(now):
                self._write(entry)
            if entry.move is not None and not entry.move.is_late:
                self._wait_for(entry)
                return True
        return False

    def _give_away(self, entry: SpillEntry) -> None:
        """Gives the memory of a snapshot away, because a tier has it, too."""
        entry.is_ahead = False
        entry.snapshot.is_below = True
        entry.snapshot.lease.release()
        self._entries.change(entry, State.BELOW)

    def _write_one(self) -> bool:
        """Waits for a move, or for a write that it begins; False if there is none."""
        self.settle()
        now = self._clock()
        due = next((entry for entry in self._entries.near.values() if entry.is_due(now)), None)
        if due is not None:
            self._write(due)
        for entry in self._moving:
            if entry.move is not None and not entry.move.is_late:
                self._wait_for(entry)
                return True
        return False

    def _write(self, entry: SpillEntry) -> None:
        snapshot = entry.snapshot
        put = partial(self._put, entry.key, snapshot.seal, snapshot.chunks)
        move = Move(next(iter(self._tiers), None))
        move.start(self._workers, put)
        snapshot.lease.use(move.job)
        self._begin(entry, move, State.WRITING)

    def _put(self, key: str, seal: Seal, chunks: Sequence[memoryview], move: Move) -> None:
        """In a worker: gives a snapshot to the first tier that takes it."""
        error: Exception = TierFull("there is no tier below the arena")
        for tier in self._tiers:
            started, move.tier = self._clock(), tier
            try:
                tier.put(key, seal, chunks)
                move.seconds = self._clock() - started
                return
            except KvtideError as refusal:
                move.refusals.append((tier, refusal))
                error = refusal
        raise error

    # ---- up ----------------------------------------------------------------------------

    def _read(self, entry: SpillEntry) -> None:
        room = Lease(self._arena)
        try:
            room.extend(entry.block_count)
            views = chunk_views(room, entry.snapshot.seal)
            entry.move = Move(entry.tier, room)
            entry.move.start(
                self._workers, partial(self._get, entry.key, entry.snapshot.seal, views)
            )
            room.use(entry.move.job)
            self._entries.change(entry, State.READING)
            self._moving.append(entry)
        except BaseException:
            room.release()
            raise

    def _get(self, key: str, wanted: Seal, views: list[memoryview], move: Move) -> None:
        """In a worker: fills `views` with a snapshot's bytes."""
        assert move.tier is not None, "what isn't in the arena is in a tier"
        started = self._clock()

        def make_room(seal: Seal) -> list[memoryview]:
            if seal != wanted:
                raise SnapshotMiss("the tier has another snapshot under this key")
            return views

        move.tier.get(key, make_room)
        move.seconds = self._clock() - started

    # ---- both --------------------------------------------------------------------------

    def _begin(self, entry: SpillEntry, move: Move, state: State) -> None:
        entry.move = move
        self._entries.change(entry, state)
        self._moving.append(entry)

    def _wait_for(self, entry: SpillEntry) -> None:
        """Waits for an entry's move and notes its end, or that it is late."""
        assert entry.move is not None, "an entry that moves"
        started, move = self._clock(), entry.move
        try:
            if self._workers.settle(move.job, self._deadline_s):
                self._note_end(entry, move)
            else:
                self._note_late(entry, move)
        finally:
            self.stats.waited_seconds += self._clock() - started

    def _note_end(self, entry: SpillEntry, move: Move) -> None:
        """Notes the end of a move. Its memory is free for other moves."""
        self._moving.remove(entry)
        entry.move = None
        for tier, error in move.refusals:
            tier.counts.refused_writes[reason_of(error)] += 1
        try:
            move.job.wait()
        except Exception as error:
            self._note_failure(entry, move, error)
        else:
            self._note_success(entry, move)
        if entry.state is State.REMOVED:  # meanwhile
            self._remove_below(entry)

    def _note_success(self, entry: SpillEntry, move: Move) -> None:
        assert move.tier is not None, "a worker asked a tier"
        counts = move.tier.counts
        if move.room is None:
            counts.writes += 1
            counts.down_bytes += entry.size_bytes
            counts.down_seconds += move.seconds
            entry.tier = move.tier
        elif not move.is_late:  # otherwise it counts as a miss
            counts.hits += 1
            counts.up_bytes += entry.size_bytes
            counts.up_seconds += move.seconds
        if entry.state is State.READING:
            assert move.room is not None, "a read has room"
            entry.snapshot.lease, entry.snapshot.is_below = move.room, False
        if entry.state in (State.READING, State.WRITING):
            self._entries.change(entry, State.WRITTEN)

    def _note_late(self, entry: SpillEntry, move: Move) -> None:
        move.is_late = True
        error = TimeoutError(f"no answer in {self._deadline_s} s")
        if move.room is not None:
            self._note_miss(entry, move, move.room, error)
        elif move.tier is not None:
            move.tier.counts.refused_writes[reason_of(error)] += 1

    def _note_failure(self, entry: SpillEntry, move: Move, error: Exception) -> None:
        if move.room is None:
            entry.retry_at = self._clock() + REST_S
            if entry.state is State.WRITING:
                self._entries.change(entry, State.HERE)
        elif not move.is_late:
            self._note_miss(entry, move, move.room, error)

    def _note_miss(self, entry: SpillEntry, move: Move, room: Lease, error: Exception) -> None:
        assert move.tier is not None, "what is read is in a tier"
        if isinstance(error, SnapshotDamaged):
            move.tier.counts.damaged += 1
        else:
            move.tier.counts.misses[reason_of(error)] += 1
            error = SnapshotMiss(
                f"no tier gave a snapshot of {entry.snapshot.token_count} tokens back "
                f"({first_line(error)}); recompute this request"
            )
        room.release()
        if entry.state is State.READING:
            entry.error = to_keep(error)
            self._entries.change(entry, State.LOST)

    def _remove_below(self, entry: SpillEntry) -> None:
        if entry.tier is not None and not self._is_left:
            self._workers.start(partial(entry.tier.remove, entry.key))


def _by_name(tiers: Iterable[RetriedTier]) -> dict[str, TierCounts]:
    """The counts of tiers by their names. A second one of a name gets a number."""
    found: dict[str, TierCounts] = {}
    for number, tier in enumerate(tiers):
        found[tier.name if tier.name not in found else f"{tier.name}_{number}"] = tier.counts
    return found
