"""Spill: moves snapshots from an arena to tiers when it fills, those used least recently first.

Once the arena is fuller than its high mark, snapshots are written in the background, so that a
caller who needs room needn't wait. Only this module waits for tiers and counts what they do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from secrets import token_hex
from typing import Any, final

from kvtide.arena import HostArena, Lease
from kvtide.device import Job
from kvtide.errors import to_raise
from kvtide.snapshot import Snapshot, chunk_views
from kvtide.tier.base import Tier
from kvtide.tier.counts import SpillStats
from kvtide.tier.entry import SpillEntries, SpillEntry, State
from kvtide.tier.moves import Move, too_late
from kvtide.tier.namespace import is_shared
from kvtide.tier.retries import REST_S, RetriedTier, counts_by_name
from kvtide.tier.search import EndsAt, Search
from kvtide.tier.workers import ThreadWorkers, Workers

logger = logging.getLogger(__name__)

_WRITES_AT_ONCE = 2
_THREADS = _WRITES_AT_ONCE + 2  # a read doesn't wait for writes, nor for a search


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

        Above the share `high_mark` of the arena's blocks snapshots are written in advance. A call
        waits at most `deadline_s`, except `leave`, which waits so long for each snapshot. A move
        that takes longer counts as failed, and a read or a search also if nobody waits for it. Its
        memory is free when it ends, and until then its tier isn't asked or waited for any more.
        """
        self._arena = arena
        self._clock = clock
        self._tiers = [RetriedTier(tier, clock=clock, sleep=sleep) for tier in tiers]
        self.stats = SpillStats(counts_by_name(self._tiers))
        self._name_of = name_of
        self._prefix, self._count = token_hex(16), 0
        self._high_blocks = int(high_mark * arena.block_count)
        self._deadline_s = deadline_s
        self._workers = workers or ThreadWorkers(_THREADS, deadline_s)
        self._entries = SpillEntries()
        self._moving: list[SpillEntry] = []
        self._is_left = self._is_closed = False

    def add(self, snapshot: Snapshot) -> None:
        """Takes a new snapshot into the books, as used last. The caller must `remove` it."""
        self._count += 1
        name = self._name_of(snapshot.seal.key) or f"{self._prefix}/{self._count}"
        self._entries.add(SpillEntry(snapshot, name))
        self.settle()
        self._write_in_advance()

    def find(self, name: str, at_most_s: float | None = None) -> Snapshot | None:
        """Finds what another process left; waits for `at_most_s`, by default the deadline."""
        until = self._until() if at_most_s is None else self._clock() + at_most_s
        for tier in self._tiers:
            search = Search([name], [tier], self._workers)
            if self._has_ended(search.job, tier, until):
                for snapshot in self.take(search):
                    return snapshot
            else:
                tier.note_late(search.job)
                tier.counts.missed(too_late(self._deadline_s))
        return None

    def seek(self, names: Sequence[str], ends_at: EndsAt = lambda _: ()) -> Search:
        """Begins to look for what other processes left. Once it `has_ended`, `take` gives it."""
        self.settle()  # what hangs has its thread replaced
        return Search(names, self._tiers, self._workers, ends_at, self._clock, self._until())

    def take(self, search: Search) -> list[Snapshot]:
        """Takes what a search that has ended found into the books, as far as seals have room."""
        entries = [*search.entries(self._arena)]
        for entry in entries:
            self._entries.add(entry)
        return [entry.snapshot for entry in entries]

    def leave(self) -> int:
        """Writes all snapshots to tiers, where they stay: `find` in a later process finds them.

        Waits for that, and returns how many there are, without those that are shared, which come
        last and have one deadline for all. Those that no tier takes are lost with the arena.
        """
        self._is_left = True
        self.settle()
        while self._write_one(self._until(), also_shared=False):
            self.settle()
        until = self._until()
        while self._write_one(until):
            self.settle()
        return self._entries.kept_count()

    def make_room(self, block_count: int) -> None:
        """Frees blocks of the arena until `block_count` are free, or no more can be freed.

        Waits for tiers if need be. The lease that the caller takes says whether it was enough.
        Raises ArenaFull if they are free, and what is below could not come back without them.
        """
        until = self._until()
        self._make_room(block_count, until)
        while not self._entries.have_way_back(self._arena.block_count - block_count):
            if not self._write_one(until):
                raise self._entries.no_way_back()

    def read_ahead(self, snapshot: Snapshot) -> bool:
        """Begins to read what is wanted soon, if there is room. Whether it is here, or lost."""
        self.settle()
        entry = self._entries.used(snapshot)
        if entry is None or entry.state not in (State.BELOW, State.READING):
            return True
        if entry.state is State.READING:
            return False
        while self._arena.free_count < entry.block_count:
            others = (e for e in self._entries.near.values() if e.may_leave and not e.is_ahead)
            other = next(others, None)
            if other is None:
                return False
            self._give_away(other)
        self._read(entry)
        entry.is_ahead = True
        return False

    def is_coming(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is being read, so that to wait for it is of use."""
        entry = self._entries.used(snapshot)
        return entry is not None and entry.state is State.READING

    def tier_of(self, snapshot: Snapshot) -> str | None:
        """The name of the tier that it comes from, or came from ahead; None if the arena has it."""
        entry = self._entries.used(snapshot)
        return None if entry is None else entry.origin

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
        until = self._until()
        if entry.state is State.BELOW:
            self._make_room(entry.block_count, until)
            self._read(entry)
        if entry.state is State.READING:
            self._wait_for(entry, until)
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

    def settle(self) -> bool:
        """Notes which moves have ended, or hang, and whether others are left. Doesn't block."""
        for entry in tuple(self._moving):
            if entry.move is not None and entry.move.job.done():
                self._note_end(entry, entry.move)
            elif entry.move is not None and entry.move.is_hung_read(self._deadline_s):
                self._wait_for(entry, 0.0)
        return bool(self._moving)

    def close(self) -> None:
        """Waits for all moves, at most `deadline_s`. Repeatable.

        Closes neither the arena nor the tiers. What hangs then ends with the process.
        """
        until = self._until()
        for entry in self._moving:
            if entry.move is not None:
                self._workers.settle(entry.move.job, max(0.0, until - self._clock()))
        self.settle()
        for tier in self._tiers if not self._is_closed else ():
            self._workers.start(tier.tidy)
        self._workers.close(max(0.0, until - self._clock()))
        self._is_closed = True
        for entry in self._moving:
            if entry.move is not None and entry.move.tier is not None:
                what = "kvtide ends without a move of %d bytes, which hangs in the tier %r"
                logger.warning(what, entry.size_bytes, entry.move.tier.name)

    def _until(self) -> float:
        """How long a call that begins now may wait, by the clock."""
        return self._clock() + self._deadline_s

    # ---- down --------------------------------------------------------------------------

    def _write_in_advance(self) -> None:
        """Begins writes until the rest of what only the arena has is within the high mark."""
        surplus = self._entries.unwritten_blocks - self._high_blocks
        for entry in self._entries.near.values():
            if surplus <= 0 or len(self._moving) >= _WRITES_AT_ONCE:
                return
            if entry.is_due(self._clock()) and self._may_write(entry):
                self._write(entry)
            surplus -= entry.block_count if entry.is_unwritten else 0

    def _make_room(self, block_count: int, until: float) -> None:
        self.settle()
        if block_count > self._arena.block_count:
            return
        while self._arena.free_count < block_count and self._free_one(until):
            pass

    def _free_one(self, until: float) -> bool:
        """Gives the least recently used snapshot's memory away, or takes a step towards that.

        May wait for a tier. False if no snapshot can leave.
        """
        now = self._clock()
        # A snapshot that was removed while it moved has memory until the move ends.
        removed = (entry for entry in self._moving if entry.state is State.REMOVED)
        for entry in chain(removed, self._entries.near.values()):
            if entry.may_leave:
                self._give_away(entry)
                return True
            if now >= until:
                continue  # a move that nobody has time for isn't late
            if entry.is_due(now) and self._may_write(entry):
                self._write(entry)
            if entry.move is not None and not entry.move.is_late:
                self._wait_for(entry, until)
                return True
        return False

    def _give_away(self, entry: SpillEntry) -> None:
        """Gives the memory of a snapshot away, because a tier has it, too."""
        entry.is_ahead = False
        entry.snapshot.is_below = True
        entry.snapshot.lease.release()
        self._entries.change(entry, State.BELOW)

    def _write_one(self, until: float, *, also_shared: bool = True) -> bool:
        """Waits for a move, or for a write that it begins; False if there is none, or no time."""
        now = self._clock()
        if now >= until:
            return False
        due = (entry for entry in self._entries.near.values() if entry.is_due(now))
        due = (entry for entry in due if also_shared or not is_shared(entry.key))
        for entry in islice(filter(self._may_write, due), 1):
            self._write(entry)
        for entry in self._moving:
            if entry.move is not None and not entry.move.is_late:
                self._wait_for(entry, until)
                return True
        return False

    def _may_write(self, entry: SpillEntry) -> bool:
        """Whether a tier takes snapshots now, and no older one moves under the same key."""
        is_alone = all(other.key != entry.key for other in self._moving)
        return is_alone and any(tier.takes for tier in self._tiers)

    def _write(self, entry: SpillEntry) -> None:
        snapshot = entry.snapshot
        move = Move(entry.key, snapshot.seal, self._tiers, self._clock)
        move.start(self._workers, partial(move.down, snapshot.chunks), snapshot.lease)
        self._begin(entry, move, State.WRITING)

    # ---- up ----------------------------------------------------------------------------

    def _read(self, entry: SpillEntry) -> None:
        assert entry.tier is not None, "what isn't in the arena is in a tier"
        seal, room = entry.snapshot.seal, Lease(self._arena)
        try:
            room.extend(entry.block_count)
            move = Move(entry.key, seal, [entry.tier], self._clock, room)
            move.start(self._workers, partial(move.up, chunk_views(room, seal)), room)
            self._begin(entry, move, State.READING)
        except BaseException:
            room.release()
            raise

    # ---- both --------------------------------------------------------------------------

    def _begin(self, entry: SpillEntry, move: Move, state: State) -> None:
        entry.move = move
        self._entries.change(entry, state)
        self._moving.append(entry)

    def _has_ended(self, job: Job[Any], tier: RetriedTier | None, until: float) -> bool:
        """Waits for a job that asks a tier, unless that hangs; whether it has ended."""
        is_hung = tier is not None and tier.is_hung
        timeout_s = 0.0 if is_hung else until - self._clock()
        # A clock that was set meanwhile changes the wait, and doesn't make it endless.
        return self._workers.settle(job, min(max(timeout_s, 0.0), self._deadline_s))

    def _wait_for(self, entry: SpillEntry, until: float) -> None:
        """Waits for an entry's move and notes its end, or that it is late."""
        assert entry.move is not None, "an entry that moves"
        started, move = self._clock(), entry.move
        try:
            if self._has_ended(move.job, move.tier, until):
                self._note_end(entry, move)
            else:
                self._note_late(entry, move)
        finally:
            self.stats.waited_seconds += self._clock() - started

    def _note_end(self, entry: SpillEntry, move: Move) -> None:
        """Notes the end of a move. Its memory is free for other moves."""
        self._moving.remove(entry)
        entry.move = None
        for tier, refusal in move.refusals:
            tier.counts.refused(refusal)
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
        if move.room is None:
            if not move.was_there:
                move.tier.counts.took(entry.size_bytes, move.seconds)
            entry.tier = move.tier
        elif not move.is_late:  # otherwise it was counted as a miss
            move.tier.counts.gave(entry.size_bytes, move.seconds)
        if entry.state is State.READING:
            assert move.room is not None, "a read has room"
            entry.snapshot.lease, entry.snapshot.is_below = move.room, False
        if entry.state in (State.READING, State.WRITING):
            self._entries.change(entry, State.WRITTEN)

    def _note_late(self, entry: SpillEntry, move: Move) -> None:
        move.is_late = True
        if move.tier is None:
            return
        move.tier.note_late(move.job)  # the one that it asks by now
        if move.room is not None:
            self._note_miss(entry, move, move.room, too_late(self._deadline_s))
        else:
            move.tier.counts.refused(too_late(self._deadline_s))

    def _note_failure(self, entry: SpillEntry, move: Move, error: Exception) -> None:
        if move.room is None:
            entry.retry_at = self._clock() + REST_S
            if entry.state is State.WRITING:
                self._entries.change(entry, State.HERE)
        elif not move.is_late:
            self._note_miss(entry, move, move.room, error)

    def _note_miss(self, entry: SpillEntry, move: Move, room: Lease, error: Exception) -> None:
        assert move.tier is not None, "what is read is in a tier"
        move.tier.counts.missed(error)
        room.release()
        if entry.state is not State.READING:
            return
        entry.note_loss(error)
        self._entries.change(entry, State.LOST)

    def _remove_below(self, entry: SpillEntry) -> None:
        stays = self._is_left or self._is_closed or is_shared(entry.key)
        if entry.tier is not None and not stays:
            entry.tier.forget(entry.key)
            self._workers.start(partial(entry.tier.tidy, entry.key))
