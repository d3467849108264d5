"""PrefixCache: requests that begin with the same tokens share the KV of these tokens.

Tokens are shared in blocks of one size, which fill whole pages. A block's key is a hash of its
tokens and of the key before it; the first key comes from the namespace. So blocks with one key have
the same tokens before them, of one model and one tenant.

A block is on the device, or below it: in the arena or a tier. Requests that run read blocks on the
device. A block that nobody reads stays until its pages are needed; the one that was used least
recently leaves first. A request reads its blocks from the first one on, and lets the last one go
first. So no block leaves before those that are of no use without it.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import lcm
from typing import final

from kvtide.errors import ArenaFull, SlotsLost, SnapshotDamaged, SnapshotMiss
from kvtide.pool import PageAllocator
from kvtide.serve.request import PrefixBlock, Request
from kvtide.tide import Tide
from kvtide.tier import Spill

_FAST_TOKENS = 64
"""About how many tokens a block has in fast mode: small ones would waste the arena's blocks."""

_NO_BLOCKS = 1 << 62
"""A block of so many tokens is never full, so nothing is shared."""


def block_tokens_for(chunk_tokens: int, page_size: int, *, exact: bool) -> int:
    """How many tokens a block has: whole pages, and in exact mode whole chunks of prompts.

    A chunk is a step of its own, whose bits depend on its length. All requests compute a prompt's
    full chunks in the same manner, so their KV has the same bits. The rest of a prompt, and an
    answer, is computed in other steps than the same tokens in a longer prompt.
    """
    if exact:
        return lcm(chunk_tokens, page_size)
    return page_size * max(1, _FAST_TOKENS // page_size)


@final
@dataclass(slots=True)
class PrefixStats:
    """Counts since the start.

    `cached_tokens` counts tokens of prompts that needn't be computed, by where their KV was.
    `evicted` counts blocks that left the device, `dropped` those that are nowhere any more, and
    `failed` those of them that didn't come back from below. Seconds are as in SchedulerStats.
    """

    cached_tokens: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    dropped: int = 0
    failed: int = 0
    offload_seconds: float = 0.0
    restore_seconds: float = 0.0


@final
class PrefixCache:
    """The blocks that requests share, and the pages that they hold. Not thread-safe."""

    def __init__(
        self,
        tide: Tide,
        pages: PageAllocator,
        block_tokens: int = 0,
        *,
        seed_of: Callable[[Request], str] = lambda _: "",
        shares_answers: bool = False,
        below_bytes: int = 0,
        spill: Spill | None = None,
    ) -> None:
        """A block has `block_tokens` tokens, whole pages; 0 shares nothing.

        `seed_of` gives a text that requests have in common if they may share at all. With
        `shares_answers` answers are shared like prompts. Blocks that leave the device go to the
        arena, and by its `spill` to tiers, where they take at most `below_bytes` in all.
        """
        self.stats = PrefixStats()
        self._tide = tide
        self._pages = pages
        self._block_tokens = block_tokens or _NO_BLOCKS
        self._block_pages = block_tokens // tide.pool.page_size
        self._seed_of = seed_of
        self._shares_answers = shares_answers
        self._below_bytes = below_bytes
        self._spill = spill
        self._blocks: dict[str, PrefixBlock] = {}
        # Blocks that nobody reads, the least recently used first.
        self._idle: dict[str, PrefixBlock] = {}
        self._below: dict[str, PrefixBlock] = {}

    @property
    def idle_page_count(self) -> int:
        """Pages that hold blocks that nobody reads, so that they can be had."""
        return len(self._idle) * self._block_pages

    @property
    def blocks_here(self) -> list[PrefixBlock]:
        """The blocks that are on the device."""
        return [block for block in self._blocks.values() if block.pages]

    @property
    def block_count(self) -> int:
        """How many blocks there are, on the device and below."""
        return len(self._blocks)

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
        block = next((block for block in self._below.values() if not block.waiters), None)
        if block is None:
            return False
        self._drop(block)
        return True

    def clear(self) -> None:
        """Drops all blocks that nobody reads."""
        for block in (*self._idle.values(), *self._below.values()):
            self._drop(block)

    def read_ahead(self, request: Request) -> None:
        """Has the blocks that a request reads when it starts brought to host memory."""
        if self._spill is None:
            return
        keys = [block.key for block in request.awaited] or self._keys(request)
        for block in map(self._blocks.get, keys):
            if block is None:
                return
            if block.snapshot is not None:
                self._tide.read_ahead(block.snapshot)

    # ---- what a request reads ------------------------------------------------------------

    def read(self, request: Request) -> None:
        """Gives the request, which runs, the blocks that go on from what it has."""
        while self._can_read_next(request):
            block = self._blocks.get(self._key(request, len(request.blocks)))
            if block is None:
                return
            self._hold(block)
            source = self._bring(block)
            if source is None:
                self._let_go(block)
                return
            request.blocks.append(block)
            request.pages += block.pages
            request.stored += self._block_tokens
            # What the request had before it lost its KV isn't counted again.
            new_count = max(0, min(self._block_tokens, request.stored - request.lost))
            request.cached_tokens += new_count
            if new_count:
                self.stats.cached_tokens[source] += new_count

    def let_wait(self, request: Request) -> None:
        """Takes the blocks of a request that is retracted; it gets them again by `read_again`."""
        for block in request.blocks:
            block.waiters += 1
        request.awaited = request.blocks
        self.release(request)

    def read_again(self, request: Request) -> bool:
        """Gives a request that was retracted its blocks again; False, and none, if one is lost."""
        keys = [block.key for block in request.awaited]
        self._stop_waiting(request)
        blocks = [self._blocks[key] for key in keys if key in self._blocks]
        for block in blocks:  # all of them first: room for one must not cost another
            self._hold(block)
        if len(blocks) < len(keys) or not all(self._bring(block) for block in blocks):
            for block in reversed(blocks):
                self._let_go(block)
            return False
        request.blocks = blocks
        request.pages = [page for block in blocks for page in block.pages]
        return True

    def share(self, request: Request) -> None:
        """Makes blocks of what the request has computed. They hold their pages from now on.

        Where a block has the same key the request takes it, and gives its pages back.
        """
        end = min(request.stored, self._end(request))
        while (len(request.blocks) + 1) * self._block_tokens <= end:
            number = len(request.blocks)
            part = slice(number * self._block_pages, (number + 1) * self._block_pages)
            key, pages = self._key(request, number), request.pages[part]
            block = self._blocks.get(key)
            if block is not None and not block.pages:
                self._drop(block)
                block = None
            if block is None:
                block = self._blocks[key] = PrefixBlock(key, pages)
            else:
                request.pages[part] = block.pages
                self._pages.release(pages)
            self._hold(block)
            request.blocks.append(block)

    def release(self, request: Request) -> None:
        """Gives back all pages of a request: its own, and its share of those that it reads."""
        self._pages.release(self.pages_of(request))
        for block in reversed(request.blocks):
            self._let_go(block)
        request.blocks, request.pages = [], []

    def forget(self, request: Request) -> None:
        """Releases a request that needs nothing any more of what it had."""
        self.release(request)
        self._stop_waiting(request)

    def pages_of(self, request: Request) -> list[int]:
        """The pages that the request alone holds, which come after those of its blocks."""
        return request.pages[len(request.blocks) * self._block_pages :]

    def token_count_of(self, request: Request) -> int:
        """The tokens in the blocks that the request reads: its first ones."""
        return len(request.blocks) * self._block_tokens

    def common_page_count(self, request: Request) -> int:
        """Pages of the request's first tokens that others hold, so that it needs none for them."""
        count = 0
        for block in map(self._blocks.get, self._keys(request)):
            if block is None or not (block.readers and block.pages):
                break
            count += 1
        return count * self._block_pages

    def keys_in(self, request: Request, token_count: int) -> list[str]:
        """The keys of the blocks that the next `token_count` tokens of the request begin."""
        end = min(request.stored + token_count, self._most(request))
        first = -(-request.stored // self._block_tokens)
        return [self._key(request, number) for number in range(first, end // self._block_tokens)]

    # ---- blocks --------------------------------------------------------------------------

    def _hold(self, block: PrefixBlock) -> None:
        """Counts a reader; until it lets go the block doesn't leave."""
        block.readers += 1
        self._idle.pop(block.key, None)
        self._below.pop(block.key, None)

    def _let_go(self, block: PrefixBlock) -> None:
        block.readers -= 1
        if block.readers:
            return
        if block.pages:
            self._idle[block.key] = block
        elif block.snapshot is not None:
            self._below[block.key] = block
        else:
            del self._blocks[block.key]

    def _bring(self, block: PrefixBlock) -> str | None:
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

    def _evict(self, block: PrefixBlock) -> None:
        """Takes the pages of a block that nobody reads. It goes below the device if it can."""
        self.stats.evicted += 1
        started = time.perf_counter()
        if self._below_bytes and self._save(block):
            del self._idle[block.key]
            self._below[block.key] = block
            self.stats.offload_seconds += time.perf_counter() - started
        else:
            self._drop(block)

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
        size_bytes = len(block.snapshot.seal.used_bytes) * self._tide.arena.block_bytes
        while (len(self._below) + 1) * size_bytes > self._below_bytes and self.give_way():
            pass
        return True

    def _drop(self, block: PrefixBlock) -> None:
        """Forgets a block that nobody reads, wherever it is."""
        self.stats.dropped += 1
        for blocks in (self._blocks, self._idle, self._below):
            blocks.pop(block.key, None)
        self._pages.release(block.pages)
        block.pages = []
        if block.snapshot is not None:
            self._tide.discard(block.snapshot)

    def _stop_waiting(self, request: Request) -> None:
        for block in request.awaited:
            block.waiters -= 1
        request.awaited = []

    # ---- which tokens are shared -----------------------------------------------------------

    def _can_read_next(self, request: Request) -> bool:
        """Whether the request is at the end of its blocks, and its next tokens may be shared."""
        stored = request.stored
        return (
            stored + self._block_tokens <= self._most(request)
            and stored == self.token_count_of(request)
            and stored == len(request.pages) * self._tide.pool.page_size
        )

    def _most(self, request: Request) -> int:
        """How many tokens a request may read at most. The last one is computed: for its logits."""
        return min(request.token_count - 1, self._end(request))

    def _end(self, request: Request) -> int:
        """How many tokens have KV that may be shared once they have KV."""
        return request.token_count if self._shares_answers else len(request.prompt_ids)

    def _keys(self, request: Request) -> Iterator[str]:
        """The keys of all blocks that the request may read, made as they are asked for."""
        count = self._most(request) // self._block_tokens
        return (self._key(request, number) for number in range(count))

    def _key(self, request: Request, number: int) -> str:
        """The key of the request's block with that number, from 0 on."""
        keys = request.block_keys
        while len(keys) <= number:
            first = len(keys) * self._block_tokens
            tokens = array("q", request.tokens(first, self._block_tokens)).tobytes()
            before = keys[-1] if keys else self._seed_of(request)
            keys.append(hashlib.blake2b(before.encode() + tokens, digest_size=16).hexdigest())
        return keys[number]
