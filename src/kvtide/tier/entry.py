"""SpillEntry: what Spill knows of a snapshot. SpillEntries: all of them, in the order of use."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto
from itertools import chain
from typing import final

from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss, first_line, to_keep
from kvtide.snapshot import Snapshot
from kvtide.tier.moves import Move
from kvtide.tier.namespace import is_shared
from kvtide.tier.retries import RetriedTier


class State(Enum):
    """Where a snapshot is.

        HERE → WRITING → WRITTEN → BELOW → READING → WRITTEN
                  ↳ HERE                      ↳ LOST            when the move fails

    From each of them it may be REMOVED, also while it moves.
    """

    HERE = auto()
    """In the arena alone: it must be written before its memory can be given away."""
    WRITING = auto()
    """In the arena, and on its way to a tier."""
    WRITTEN = auto()
    """In the arena and in a tier: its memory can be given away at once."""
    BELOW = auto()
    """In a tier alone."""
    READING = auto()
    """In a tier, and on its way to the arena."""
    LOST = auto()
    """Nowhere: no tier gave it back, so its request must be computed again."""
    REMOVED = auto()
    """Not in the books any more."""


_BELOW_ALONE = (State.BELOW, State.LOST)


@final
class SpillEntry:
    """The entry of a snapshot in the books. SpillEntries changes its `state`."""

    def __init__(self, snapshot: Snapshot, key: str, state: State = State.HERE) -> None:
        self.snapshot = snapshot
        self.key = key
        self.state = state
        used_bytes = snapshot.seal.used_bytes
        self.size_bytes = sum(used_bytes)
        self.block_count = len(used_bytes)
        """How many blocks it takes, or would take."""
        self.tier: RetriedTier | None = None
        """The tier that has it, if there is one."""
        self.move: Move | None = None
        """Its move, until that has ended: also when the snapshot was removed meanwhile."""
        self.error: Exception | None = None
        """Why it is lost."""
        self.retry_at = float("-inf")
        """When it may be written again, by the clock; set when no tier took it."""
        self.is_ahead = False
        """Whether it came, or comes, back to the arena before a caller needs it."""

    @property
    def is_unwritten(self) -> bool:
        """Whether only the arena has it."""
        return self.state is State.HERE or self.state is State.WRITING

    @property
    def may_leave(self) -> bool:
        """Whether it is in a tier, too, and no move uses its memory."""
        return self.state is State.WRITTEN and not self.snapshot.lease.in_use

    @property
    def origin(self) -> str | None:
        """The name of the tier that it comes from, or came from ahead; None if it never left."""
        is_from_there = self.is_ahead or self.state in (State.BELOW, State.READING)
        return self.tier.name if is_from_there and self.tier is not None else None

    def is_due(self, now: float) -> bool:
        """Whether it can be written now."""
        return (
            self.state is State.HERE
            and self.move is None
            and self.retry_at <= now
            and not self.snapshot.lease.in_use
        )

    def note_loss(self, error: Exception) -> None:
        """Keeps why no tier gave it back."""
        if not isinstance(error, SnapshotDamaged):
            error = SnapshotMiss(
                f"no tier gave a snapshot of {self.snapshot.token_count} tokens back "
                f"({first_line(error)}); recompute this request"
            )
        self.error = to_keep(error)


@final
class SpillEntries:
    """The books: entries by their snapshots.

    `near` has those with memory of the arena, the least recently used first. There are at most as
    many as blocks, or have no bytes; so what goes through them takes no longer when much is below.
    """

    def __init__(self) -> None:
        self.near: dict[int, SpillEntry] = {}
        self._far: dict[int, SpillEntry] = {}
        self.unwritten_blocks = 0
        """Blocks of what is in no tier yet."""
        self._below: Counter[int] = Counter()
        """How many of those below would take so many blocks."""

    def __len__(self) -> int:
        return len(self.near) + len(self._far)

    def add(self, entry: SpillEntry) -> None:
        """Takes a new entry into the books, as used last."""
        self._count(entry, 1)
        self._shelf(entry)[id(entry.snapshot)] = entry

    def used(self, snapshot: Snapshot) -> SpillEntry | None:
        """The entry of a snapshot, which now counts as used last; None if it isn't in the books."""
        place = id(snapshot)
        entry = self.near.pop(place, None)
        if entry is None:
            return self._far.get(place)
        self.near[place] = entry
        return entry

    def change(self, entry: SpillEntry, state: State) -> None:
        """Gives an entry another state. What gets memory of the arena counts as used last."""
        place, shelf = id(entry.snapshot), self._shelf(entry)
        self._count(entry, -1)
        entry.state = state
        self._count(entry, 1)
        if state is State.REMOVED:
            del shelf[place]
        elif self._shelf(entry) is not shelf:
            del shelf[place]
            self._shelf(entry)[place] = entry

    def kept_count(self) -> int:
        """How many a tier has, without those that are shared."""
        kept = (State.WRITTEN, State.BELOW, State.READING)
        entries = chain(self.near.values(), self._far.values())
        return sum(entry.state in kept and not is_shared(entry.key) for entry in entries)

    def pop(self, snapshot: Snapshot) -> SpillEntry | None:
        """Removes the entry of a snapshot; None if it isn't in the books."""
        entry = self.near.get(id(snapshot)) or self._far.get(id(snapshot))
        if entry is not None:
            self.change(entry, State.REMOVED)
        return entry

    @property
    def largest_below(self) -> int:
        """The most blocks that one of those below takes when it comes back; 0 if none is there."""
        return max(self._below, default=0)

    def have_way_back(self, left_blocks: int) -> bool:
        """Whether all that is below could come back one by one in so many blocks of the arena.

        What a full tier refuses would keep it from that for ever. In an arena that is too small
        there is no such promise.
        """
        left_blocks -= self.largest_below
        return left_blocks < 0 or self.unwritten_blocks <= left_blocks

    def no_way_back(self) -> ArenaFull:
        """The error for a request without which all that is below can come back."""
        return ArenaFull(
            f"host arena: {self.largest_below} blocks are kept for what is below, and no tier "
            "takes more; let this request be recomputed"
        )

    def _count(self, entry: SpillEntry, change: int) -> None:
        blocks = entry.block_count
        if entry.is_unwritten:
            self.unwritten_blocks += change * blocks
        elif entry.state is State.BELOW:
            self._below[blocks] += change
            if not self._below[blocks]:
                del self._below[blocks]

    def _shelf(self, entry: SpillEntry) -> dict[int, SpillEntry]:
        return self._far if entry.state in _BELOW_ALONE else self.near
