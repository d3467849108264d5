"""Blocks: where the KV is that requests share, and how it gets from one place to another.

A block is on the device, or below it: in the arena or a tier. Requests that run read blocks on the
device. A block that nobody reads stays until its pages are needed; the one that was used least
recently leaves first. In tiers blocks stay when they are forgotten here: another engine finds them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from kvtide.errors import ArenaFull, SlotsLost, SnapshotDamaged, SnapshotMiss
from kvtide.pool import PageAllocator
from kvtide.serve.request import PrefixBlock
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import Spill

_LEAVE_S = 30.0


@final
@dataclass(slots=True)
class PrefixStats:
    """Counts since the start.

    `cached_tokens` counts tokens of prompts that needn't be computed, by where their KV was.
    `evicted` counts blocks that left the device, `dropped` those that are forgotten, and `failed`
    those of them that didn't come back from below. Seconds are as in SchedulerStats.
    """

    cached_tokens: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    dropped: int = 0
    failed: int = 0
    offload_seconds: float = 0.0
    restore_seconds: float = 0.0


@final
class Blocks:
    """The blocks of a PrefixCache by their keys, and their pages. Not thread-safe."""

    def __init__(
        self,
        tide: Tide,
        pages: PageAllocator,
        block_tokens: int,
        below_bytes: int,
        spill: Spill | None,
    ) -> None:
        """A block has `block_tokens` tokens, which are whole pages.

        Blocks that leave the device go to the arena, and by its `spill` to tiers; those that are
        known here take at most `below_bytes` there.
        """
        self.stats = PrefixStats()
        self.known: dict[str, PrefixBlock] = {}
        self.below: dict[str, PrefixBlock] = {}
        """Blocks below the device that nobody reads, the least recently used first."""
        self._idle: dict[str, PrefixBlock] = {}
        """Blocks on the device that nobody reads, the least recently used first."""
        self._tide = tide
        self._pages = pages
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // tide.pool.page_size
        self._below_bytes = below_bytes
        self._spill = spill

    @property
    def idle_page_count(self) -> int:
        """Pages that hold blocks that nobody reads, so that they can be had."""
        return len(self._idle) * self._block_pages

    def add(self, key: str, pages: list[int]) -> PrefixBlock:
        """Makes a block of pages, which it holds from now on."""
        self.known[key] = PrefixBlock(key, pages)
        return self.known[key]

    def take(self, snapshots: Sequence[Snapshot]) -> None:
        """Makes blocks of what other engines left in tiers. It comes from files, so it is checked.

        They are in the order of a prefix, whose first block is to leave last.
        """
        for snapshot in reversed(snapshots):
            if self._is_block(snapshot) and snapshot.seal.key not in self.known:
                block = self.add(snapshot.seal.key, [])
                block.snapshot = snapshot
                self.below[block.key] = block
                self._keep_to_limit(snapshot)
            else:
                self._tide.discard(snapshot)

    def hold(self, block: PrefixBlock) -> None:
        """Counts a reader; until it lets go the block doesn't leave."""
        block.readers += 1
        self._idle.pop(block.key, None)
        self.below.pop(block.key, None)

    def let_go(self, block: PrefixBlock) -> None:
        """Counts a reader less."""
        block.readers -= 1
        if block.readers:
            return
        if block.pages:
            self._idle[block.key] = block
        elif block.snapshot is not None:
            self.below[block.key] = block
        else:
            del self.known[block.key]

    def bring(self, block: PrefixBlock) -> str | None:
        """Brings a block that is held to the device; gives where it was, None if it can't be."""
        if block.snapshot is None:
            return "device" if block.pages else None
        if not self.make_room(self._block_pages):
            return None
        place = None if self._spill is None else self._spill.tier_of(block.snapshot)
        started = time.perf_counter()
        try:
            pages = self._tide.resume(block.snapshot, self._block_pages, key=block.key)
        except (SnapshotDamaged, SnapshotMiss, SlotsLost, ArenaFull):
            self.stats.failed += 1
            self.stats.dropped += 1
            self._tide.discard(block.snapshot)
            block.snapshot = None
            return None
        self.stats.restore_seconds += time.perf_counter() - started
        assert pages is not None, "there was room"
        block.pages, block.snapshot = pages, None
        return place or "host"

    def make_room(self, page_count: int) -> bool:
        """Frees pages until `page_count` are free; False, and no change, if that can't be."""
        if page_count > self._pages.free_count + self.idle_page_count:
            return False
        while self._pages.free_count < page_count:
            self._evict(next(iter(self._idle.values())))
        return True

    def give_way(self) -> bool:
        """Drops a block below the device, so that a snapshot has room. False if there is none.

        Takes the one that was used least recently of those that no retracted request needs.
        """
        block = next((block for block in self.below.values() if not block.waiters), None)
        if block is None:
            return False
        self.drop(block)
        return True

    def leave(self) -> None:
        """Moves blocks that nobody reads off the device, so that later engines find them in tiers.

        Those that were used last come last. Takes half a minute at most, beside a tier's deadline.
        """
        until = time.monotonic() + _LEAVE_S
        while self._spill is not None and self._idle and time.monotonic() < until:
            self._evict(next(iter(self._idle.values())))

    def clear(self) -> None:
        """Drops all blocks that nobody reads."""
        for block in (*self._idle.values(), *self.below.values()):
            self.drop(block)

    def drop(self, block: PrefixBlock) -> None:
        """Forgets a block that nobody reads, wherever it is. If a tier has it, it stays there."""
        self.stats.dropped += 1
        for blocks in (self.known, self._idle, self.below):
            blocks.pop(block.key, None)
        self._pages.release(block.pages)
        block.pages = []
        if block.snapshot is not None:
            self._tide.discard(block.snapshot)

    def _evict(self, block: PrefixBlock) -> None:
        """Takes the pages of a block that nobody reads. It goes below the device if it can."""
        self.stats.evicted += 1
        started = time.perf_counter()
        if self._below_bytes and self._save(block):
            del self._idle[block.key]
            self.below[block.key] = block
            self.stats.offload_seconds += time.perf_counter() - started
        else:
            self.drop(block)

    def _save(self, block: PrefixBlock) -> bool:
        """Moves a block to the arena; others make way for it. False if there is no room."""
        while True:
            try:
                block.snapshot = self._tide.retract(block.pages, self._block_tokens, key=block.key)
            except ArenaFull:
                if not self.give_way():
                    return False
            else:
                break
        block.pages = []
        self._keep_to_limit(block.snapshot)
        return True

    def _keep_to_limit(self, snapshot: Snapshot) -> None:
        """Drops blocks below the device until they fit, if each is as large as this one."""
        size_bytes = len(snapshot.seal.used_bytes) * self._tide.arena.block_bytes
        while (len(self.below) + 1) * size_bytes > self._below_bytes and self.give_way():
            pass

    def _is_block(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has a block's tokens, and can come to the arena."""
        seal, geometry = snapshot.seal, self._tide.pool.geometry.canonical
        try:
            seal.check_target(geometry, seal.key, self._block_tokens)
        except SnapshotMiss:
            return False
        return len(seal.used_bytes) <= self._tide.arena.block_count
