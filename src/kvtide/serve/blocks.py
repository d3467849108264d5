"""Blocks: where the KV is that requests share, and how it gets from one place to another.

A block is on the device, or below it: in the arena or a tier. Requests that run read blocks on the
device. A block that nobody reads stays until its pages are needed; the one that was used least
recently leaves first. In tiers blocks stay when they are forgotten here: another engine finds them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from kvtide.errors import ArenaFull, SlotsLost, SnapshotDamaged, SnapshotMiss
from kvtide.pool import PageAllocator, Pool
from kvtide.serve.branches import Branches
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
class _Line:
    """Blocks that nobody reads, the least recently used first, and what they take in all."""

    def __init__(self, size_of: Callable[[PrefixBlock], int]) -> None:
        self.blocks: dict[str, PrefixBlock] = {}
        self.total = 0
        self._sizes: dict[str, int] = {}
        self._size_of = size_of

    def add(self, block: PrefixBlock) -> None:
        """Takes a block as used last."""
        self.blocks[block.key] = block
        size = self._sizes[block.key] = self._size_of(block)
        self.total += size

    def remove(self, block: PrefixBlock) -> None:
        """Lets a block go, if it is here."""
        if self.blocks.pop(block.key, None) is not None:
            self.total -= self._sizes.pop(block.key)


@final
class Blocks:
    """The blocks of a PrefixCache by their keys, and their pages. Not thread-safe."""

    def __init__(
        self, tide: Tide, pages: PageAllocator, below_bytes: int, spill: Spill | None
    ) -> None:
        """Blocks that leave the device go to the arena, and by its `spill` to tiers.

        Those that are known here take at most `below_bytes` there.
        """
        self.stats = PrefixStats()
        self.known: dict[str, PrefixBlock] = {}
        self.branches = Branches()
        """The blocks that are known, by what is before them."""
        self._below = _Line(self._bytes_below)
        self._idle = _Line(lambda block: len(block.pages))
        self._tide = tide
        self._pages = pages
        self._below_bytes = below_bytes
        self._spill = spill

    @property
    def below(self) -> dict[str, PrefixBlock]:
        """Blocks below the device that nobody reads, the least recently used first."""
        return self._below.blocks

    @property
    def bytes_below(self) -> int:
        """What `below` takes."""
        return self._below.total

    @property
    def idle_page_count(self) -> int:
        """Pages that hold blocks that nobody reads, so that they can be had."""
        return self._idle.total

    def page_count_for(self, token_count: int) -> int:
        """How many pages so many tokens fill, the last one maybe in part."""
        return -(-token_count // self._tide.pool.page_size)

    def add(self, block: PrefixBlock) -> PrefixBlock:
        """Takes a new block, which holds its pages from now on."""
        self.known[block.key] = block
        self.branches.add(block.parent, block.tokens, block.key)
        return block

    def take(self, blocks: Sequence[PrefixBlock]) -> None:
        """Takes blocks that other engines left in tiers. They come from files: each is checked.

        They are in the order of a prefix, whose first block is to leave last.
        """
        for block in reversed(blocks):
            snapshot = block.snapshot
            assert snapshot is not None, "it is in a tier"
            if block.key not in self.known and self._is_sound(block, snapshot):
                self._below.add(self.add(block))
                self._keep_to_limit()
            else:
                self._tide.discard(snapshot)

    def hold(self, block: PrefixBlock) -> None:
        """Counts a reader; until it lets go the block doesn't leave."""
        block.readers += 1
        self._idle.remove(block)
        self._below.remove(block)

    def let_go(self, block: PrefixBlock) -> None:
        """Counts a reader less."""
        block.readers -= 1
        if block.readers:
            return
        if block.pages:
            self._idle.add(block)
        elif block.snapshot is not None:
            self._below.add(block)
        else:
            self._forget(block)

    def bring(self, block: PrefixBlock) -> str | None:
        """Brings a block that is held to the device; gives where it was, None if it can't be."""
        if block.snapshot is None:
            return "device" if block.pages else None
        page_count = self.page_count_for(len(block.tokens))
        if not self.make_room(page_count):
            return None
        place = None if self._spill is None else self._spill.tier_of(block.snapshot)
        started = time.perf_counter()
        try:
            pages = self._tide.resume(block.snapshot, page_count, key=block.key)
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

    def copied(self, block: PrefixBlock, token_count: int) -> list[int] | None:
        """New pages with a copy of the first tokens of a block that is held and on the device.

        None if there is no room. After an error the pages are free again.
        """
        page_count = self.page_count_for(token_count)
        if not self.make_room(page_count):
            return None
        pages = self._pages.acquire(page_count)
        assert pages is not None, "there is room"
        try:
            _copy(self._tide.pool, block.pages, pages, token_count)
        except BaseException:
            self._pages.release(pages)
            raise
        return pages

    def hand_over(self, block: PrefixBlock) -> list[int]:
        """Forgets a block on the device, and gives its pages to its only reader."""
        assert block.readers == 1, "others would read what it writes"
        self._forget(block)
        return block.pages

    def make_room(self, page_count: int) -> bool:
        """Frees pages until `page_count` are free; False, and no change, if that can't be."""
        if page_count > self._pages.free_count + self.idle_page_count:
            return False
        while self._pages.free_count < page_count:
            self._evict(next(iter(self._idle.blocks.values())))
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
        while self._spill is not None and self._idle.blocks and time.monotonic() < until:
            self._evict(next(iter(self._idle.blocks.values())))

    def clear(self) -> None:
        """Drops all blocks that nobody reads."""
        for block in (*self._idle.blocks.values(), *self.below.values()):
            self.drop(block)

    def drop(self, block: PrefixBlock) -> None:
        """Forgets a block that nobody reads, wherever it is. If a tier has it, it stays there."""
        self.stats.dropped += 1
        self._idle.remove(block)
        self._below.remove(block)
        self._forget(block)
        self._pages.release(block.pages)
        block.pages = []
        if block.snapshot is not None:
            self._tide.discard(block.snapshot)

    def _forget(self, block: PrefixBlock) -> None:
        del self.known[block.key]
        self.branches.remove(block.parent, block.tokens, block.key)

    def _evict(self, block: PrefixBlock) -> None:
        """Takes the pages of a block that nobody reads. It goes below the device if it can."""
        self.stats.evicted += 1
        started = time.perf_counter()
        if self._below_bytes and self._save(block):
            self._idle.remove(block)
            self._below.add(block)
            self._keep_to_limit()
            self.stats.offload_seconds += time.perf_counter() - started
        else:
            self.drop(block)

    def _save(self, block: PrefixBlock) -> bool:
        """Moves a block to the arena; others make way for it. False if there is no room."""
        while block.snapshot is None:
            try:
                block.snapshot = self._tide.retract(block.pages, len(block.tokens), key=block.key)
            except ArenaFull:
                if not self.give_way():
                    return False
        block.pages = []
        return True

    def _keep_to_limit(self) -> None:
        """Drops blocks below the device until they fit."""
        while self._below.total > self._below_bytes and self.give_way():
            pass

    def _bytes_below(self, block: PrefixBlock) -> int:
        assert block.snapshot is not None, "it is below the device"
        return len(block.snapshot.seal.used_bytes) * self._tide.arena.block_bytes

    def _is_sound(self, block: PrefixBlock, snapshot: Snapshot) -> bool:
        """Whether a snapshot has the block's tokens, and can come to the arena."""
        seal, geometry = snapshot.seal, self._tide.pool.geometry.canonical
        try:
            seal.check_target(geometry, block.key, len(block.tokens))
        except SnapshotMiss:
            return False
        return len(seal.used_bytes) <= self._tide.arena.block_count


def _copy(pool: Pool, sources: Sequence[int], targets: Sequence[int], token_count: int) -> None:
    """Copies the first tokens of pages to others. A slot is a row in all served layouts."""
    device = pool.device.torch_device
    here, there = (
        torch.from_numpy(pool.slots_of(pages)[:token_count]).to(device)
        for pages in (sources, targets)
    )
    for plane in pool.geometry.planes:
        for layer in range(plane.layer_count):
            rows = pool.plane(plane.name, layer)
            rows.index_copy_(0, there, rows[here])
