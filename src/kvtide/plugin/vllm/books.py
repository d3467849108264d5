"""BlockBooks: which blocks are in the workers' host memory, and which come back to it. Pure.

saving    the workers copy the block off the device
here      it is in the host memory of all ranks
coming    the ranks read it from their tiers; a request waits for it

A block that isn't in the books may still be in a tier. Whether it really is there a fetch tells; so
a wrong guess costs a step of the scheduler, and never a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final

from kvtide.plugin.vllm.messages import BlockReport, Orders, Start


class BlockPlace(Enum):
    """Where a block is."""

    NOWHERE = auto()
    SAVING = auto()
    COMING = auto()
    HERE = auto()


@final
@dataclass(slots=True)
class Asker:
    """A request that looks blocks up."""

    asked_at: int = -2
    """The last step in which it did."""
    awaited: bytes | None = None
    """A block for which it was told to wait."""


@final
@dataclass(slots=True)
class Entry:
    """A block's entry. While `readers` loads use it, or its asker still asks, it stays."""

    place: BlockPlace
    asker: Asker = field(default_factory=Asker)
    """The last request that looked it up."""
    awaited_ranks: int = 0
    """How many ranks haven't yet said that it came."""
    readers: int = 0
    is_lost: bool = False
    """Whether a rank has lost it. Then it leaves when its moves have ended."""
    came_from_tier: bool = False


@final
class BlockBooks:
    """The blocks of all ranks, at most `block_count` in each one's host memory.

    Not thread-safe: the scheduler's thread calls. Who asks for a block in one step of the scheduler
    finds it in the next, so that a request that waits for several blocks gets them all.
    """

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._block_count = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        """By key; the block used least recently first."""
        self._orders = Orders()
        self.reset_number = 0
        """The last reset: how often `clear` was called."""
        self._step = 0
        self._coming = 0
        self._below: OrderedDict[bytes, None] = OrderedDict()
        """Blocks of this process that may be in a tier, at most `_most_below`."""
        self._most_below = 0
        self._left: set[str] = set()
        self._name_of: Callable[[bytes], str] = bytes.hex

    def open(self, start: Start, name_of: Callable[[bytes], str]) -> None:
        """Says how much room there is, and what earlier processes left under which names."""
        self._block_count, self._most_below = start.block_count, start.tier_blocks
        self._left, self._name_of = set(start.names), name_of

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def is_waiting(self) -> bool:
        """Whether workers have something to report, or to be told, without any request."""
        return bool(self._coming or self._orders)

    # ---- loads ---------------------------------------------------------------------------

    def knows(self, key: bytes) -> bool:
        """Whether a block is here, or may be in a tier."""
        return key in self._entries or self._may_be_below(key)

    def look_up(self, key: bytes, asker: Asker) -> BlockPlace:
        """Where a block is. One that may be in a tier begins to come, if there is room for it."""
        entry = self._entries.get(key)
        if entry is None and self._may_be_below(key):
            entry = self._begin_fetch(key)
        if entry is None or entry.is_lost:
            return BlockPlace.NOWHERE
        asker.asked_at, entry.asker = self._step, asker
        if entry.place is not BlockPlace.HERE:
            asker.awaited = key
        self._entries.move_to_end(key)
        return entry.place

    def must_wait(self, asker: Asker) -> bool:
        """Whether a request still waits for a block, so that looking all up again is idle.

        The blocks that it asked for before count as asked for again.
        """
        entry = None if asker.awaited is None else self._entries.get(asker.awaited)
        if entry is None or entry.is_lost or entry.place is BlockPlace.HERE:
            asker.awaited = None
            return False
        asker.asked_at = self._step
        return True

    def came_from_tier(self, key: bytes) -> bool:
        """Whether a block that is here came from a tier since the process began."""
        return key in self._entries and self._entries[key].came_from_tier

    def begin_load(self, keys: Iterable[bytes]) -> None:
        """The blocks, which are here, stay until `end_load`."""
        for key in keys:
            entry = self._entries[key]
            assert entry.place is BlockPlace.HERE, f"block {key.hex()} is {entry.place}"
            entry.readers += 1
            self._entries.move_to_end(key)

    def end_load(self, keys: Iterable[bytes]) -> None:
        """A load of the blocks has ended, well or not."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:  # otherwise `clear` came meanwhile
                entry.readers -= 1
                self._drop_if_lost(key, entry)

    # ---- saves ---------------------------------------------------------------------------

    def begin_save(self, keys: Sequence[bytes]) -> list[bytes]:
        """Makes room for the blocks that aren't here; gives those for which there was room.

        A block that comes is saved all the same: maybe the tier's is damaged.
        """
        offered = set(keys)
        saved = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.place is BlockPlace.COMING:
                self._coming -= 1
                self._drop(key)
            if key in self._entries or not self._make_room(offered):
                continue
            self._entries[key] = Entry(BlockPlace.SAVING)
            saved.append(key)
        return saved

    def end_save(self, keys: Iterable[bytes]) -> list[bytes]:
        """A save of the blocks has ended; gives those that are here now."""
        kept = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.place is not BlockPlace.SAVING:
                continue
            entry.place = BlockPlace.HERE
            if not self._drop_if_lost(key, entry):
                kept.append(key)
                self.note_below(key)
        return kept

    # ---- what workers are told, and tell -------------------------------------------------

    def take_orders(self) -> Orders:
        """What the workers are to do, once."""
        orders, self._orders = self._orders, Orders()
        return orders

    def note(self, report: BlockReport) -> None:
        """Takes in what workers report, before the ends of their moves."""
        for key in report.missing:
            self._below.pop(key, None)
            self._left.discard(self._name_of(key))
            entry = self._entries.get(key)
            if entry is not None and entry.place is BlockPlace.COMING:
                self._coming -= 1
                self._drop(key)
        for key, rank_count in report.fetched.items():
            entry = self._entries.get(key)
            if entry is not None and entry.place is BlockPlace.COMING:
                entry.awaited_ranks -= rank_count
                if entry.awaited_ranks <= 0:
                    self._coming -= 1
                    entry.place, entry.came_from_tier = BlockPlace.HERE, True
                    self.note_below(key)
        for key in report.lost:
            entry = self._entries.get(key)
            if entry is not None:
                entry.is_lost = True
                self._drop_if_lost(key, entry)

    def end_step(self) -> None:
        """A step of the scheduler has ended."""
        self._step += 1

    def clear(self) -> None:
        """Forgets all blocks, those in tiers too. Moves under way end without any effect."""
        self._entries.clear()
        self._below.clear()
        self._coming = 0
        self._left.clear()
        self.reset_number += 1
        self._orders = Orders(reset_number=self.reset_number)

    def note_below(self, key: bytes) -> None:
        """A tier may have the block from now on: workers write what they have, or it was seen."""
        if not self._most_below:
            return
        self._below[key] = None
        self._below.move_to_end(key)
        while len(self._below) > self._most_below:
            self._below.popitem(last=False)

    # ---- room ----------------------------------------------------------------------------

    def _may_be_below(self, key: bytes) -> bool:
        return key in self._below or bool(self._left and self._name_of(key) in self._left)

    def _begin_fetch(self, key: bytes) -> Entry | None:
        if not self._make_room(()):
            return None
        entry = self._entries[key] = Entry(BlockPlace.COMING, awaited_ranks=self._rank_count)
        self._coming += 1
        self._orders.fetch.append(key)
        return entry

    def _make_room(self, offered: Collection[bytes]) -> bool:
        """Makes room for a block, if need be by forgetting another that isn't `offered`."""
        if len(self._entries) < self._block_count:
            return True
        oldest = next(self._idle(offered), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _idle(self, offered: Collection[bytes]) -> Iterator[bytes]:
        """The blocks that may leave, the one used least recently first.

        A block that a request asked for in this step or the one before stays: the request may wait
        for others, and would wait forever if these drove out the first.
        """
        for key, entry in self._entries.items():
            is_asked_for = entry.asker.asked_at >= self._step - 1
            is_still = entry.place is BlockPlace.HERE and not entry.readers
            if is_still and not is_asked_for and key not in offered:
                yield key

    def _drop_if_lost(self, key: bytes, entry: Entry) -> bool:
        leaves = entry.is_lost and entry.place is BlockPlace.HERE and not entry.readers
        if leaves:
            self._drop(key)
        return leaves

    def _drop(self, key: bytes) -> None:
        del self._entries[key]
        self._orders.forget.append(key)
