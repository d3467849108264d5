"""PrefixCache: requests that begin with the same tokens share the KV of these tokens.

Tokens are shared in blocks of one size, which fill whole pages. A block's key is a hash of its
tokens and of the key before it, and of all else that decides its bytes, such as the model and the
tenant. So blocks with one key have the same tokens before them, and other engines find them.

A request reads its blocks from the first one on, and lets the last one go first. So no block leaves
before those that are of no use without it. `kvtide.serve.blocks` has the places of blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from itertools import dropwhile
from math import lcm
from typing import final

from kvtide.pool import PageAllocator
from kvtide.serve.blocks import Blocks, PrefixStats
from kvtide.serve.request import PrefixBlock, Request
from kvtide.serve.seeker import Seeker
from kvtide.tide import Tide
from kvtide.tier import Spill

_FEW_TOKENS = 64
"""About how many tokens a block has: small ones would waste the arena's blocks."""

_NO_BLOCKS = 1 << 62
"""A block of so many tokens is never full, so nothing is shared."""


def block_tokens_for(chunk_tokens: int, page_size: int, *, whole_chunks: bool) -> int:
    """How many tokens a block has: whole pages, and with `whole_chunks` whole chunks of prompts.

    Whole chunks are needed where the bits of a prompt's token depend on the chunk that it is in
    (`ExactRules.by_position`): all requests compute a prompt's full chunks in the same manner, but
    not the rest of a prompt.
    """
    if whole_chunks:
        return lcm(chunk_tokens, page_size)
    return page_size * max(1, _FEW_TOKENS // page_size)


@final
class PrefixCache:
    """The blocks that requests share, and the pages that they hold. Not thread-safe."""

    def __init__(
        self,
        tide: Tide,
        pages: PageAllocator,
        block_tokens: int = 0,
        *,
        key_of: Callable[[Request, str], str] = lambda _, chain: chain,
        shares_answers: bool = False,
        below_bytes: int = 0,
        spill: Spill | None = None,
    ) -> None:
        """A block has `block_tokens` tokens, whole pages; 0 shares nothing.

        `key_of` gives the key of a request's block from a hash of its tokens and of those before
        them. Requests that may share have the same. With `shares_answers` answers are shared like
        prompts. Blocks that leave the device go to the arena, and by its `spill` to tiers: those
        that this cache knows take at most `below_bytes`. In tiers they stay for other engines.
        """
        self.blocks = Blocks(tide, pages, block_tokens or _NO_BLOCKS, below_bytes, spill)
        self._tide = tide
        self._pages = pages
        self._block_tokens = block_tokens or _NO_BLOCKS
        self._block_pages = block_tokens // tide.pool.page_size
        self._key_of = key_of
        self._shares_answers = shares_answers
        self._spill = spill
        self._seeker = Seeker(spill) if spill is not None and below_bytes else None

    @property
    def stats(self) -> PrefixStats:
        """What was spared and moved."""
        return self.blocks.stats

    @property
    def idle_page_count(self) -> int:
        """Pages that hold blocks that nobody reads, so that they can be had."""
        return self.blocks.idle_page_count

    @property
    def blocks_here(self) -> list[PrefixBlock]:
        """The blocks that are on the device."""
        return [block for block in self.blocks.known.values() if block.pages]

    @property
    def has_tiers(self) -> bool:
        """Whether blocks may go to tiers, where they leave for others."""
        return self._spill is not None

    def read_ahead(self, request: Request) -> None:
        """Has the blocks that a request reads when it starts brought to host memory."""
        if self._spill is None:
            return
        for key in [block.key for block in request.awaited] or self._keys(request):
            block = self._known(request, key)
            if block is None:
                return
            if block.snapshot is not None:
                self._tide.read_ahead(block.snapshot)

    def pause(self) -> None:
        """Waits a moment, when all requests wait for blocks."""
        assert self._seeker is not None, "otherwise nobody waits"
        self._seeker.pause()

    # ---- what a request reads ------------------------------------------------------------

    def read(self, request: Request) -> bool:
        """Gives the request, which runs, the blocks that go on from what it has.

        False if its next block may come from a tier soon, so that it had better wait for that than
        compute it. Never waits itself, but for a moment.
        """
        while self._can_read_next(request):
            block = self._known(request, self._key(request, len(request.blocks)))
            if self._is_coming(request, block):
                return not (self._seeker is not None and self._seeker.may_wait(request))
            if block is None:
                return True
            self.blocks.hold(block)
            source = self.blocks.bring(block)
            if source is None:
                self.blocks.let_go(block)
                return True
            if self._seeker is not None:
                self._seeker.note_progress(request)
            request.blocks.append(block)
            request.pages += block.pages
            request.stored += self._block_tokens
            # What the request had before it lost its KV isn't counted again.
            new_count = max(0, min(self._block_tokens, request.stored - request.lost))
            request.cached_tokens += new_count
            if new_count:
                self.blocks.stats.cached_tokens[source] += new_count
        return True

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
        blocks = [self.blocks.known[key] for key in keys if key in self.blocks.known]
        for block in blocks:  # all of them first: room for one must not cost another
            self.blocks.hold(block)
        if len(blocks) < len(keys) or not all(self.blocks.bring(block) for block in blocks):
            for block in reversed(blocks):
                self.blocks.let_go(block)
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
            block = self.blocks.known.get(key)
            if block is not None and not block.pages:
                self.blocks.drop(block)
                block = None
            if block is None:
                block = self.blocks.add(key, pages)
            else:
                request.pages[part] = block.pages
                self._pages.release(pages)
            self.blocks.hold(block)
            request.blocks.append(block)

    def release(self, request: Request) -> None:
        """Gives back all pages of a request: its own, and its share of those that it reads."""
        self._pages.release(self.pages_of(request))
        for block in reversed(request.blocks):
            self.blocks.let_go(block)
        request.blocks, request.pages = [], []

    def forget(self, request: Request) -> None:
        """Releases a request that needs nothing any more of what it had."""
        self.release(request)
        self._stop_waiting(request)
        if self._seeker is not None:
            self._seeker.forget(request)

    def pages_of(self, request: Request) -> list[int]:
        """The pages that the request alone holds, which come after those of its blocks."""
        return request.pages[len(request.blocks) * self._block_pages :]

    def token_count_of(self, request: Request) -> int:
        """The tokens in the blocks that the request reads: its first ones."""
        return len(request.blocks) * self._block_tokens

    def common_page_count(self, request: Request) -> int:
        """Pages of the request's first tokens that others hold, so that it needs none for them.

        Of a request with a snapshot only the blocks that aren't in it count: the others come back
        to pages of its own.
        """
        awaited = [block.key for block in request.awaited]
        keys = self._keys(request) if request.snapshot is None else awaited
        count = 0
        for block in map(self.blocks.known.get, keys):
            if block is None or not (block.readers and block.pages):
                break
            count += 1
        return count * self._block_pages

    def keys_in(self, request: Request, token_count: int) -> list[str]:
        """The keys of the blocks that the next `token_count` tokens of the request begin."""
        end = min(request.stored + token_count, self._most(request))
        first = -(-request.stored // self._block_tokens)
        return [self._key(request, number) for number in range(first, end // self._block_tokens)]

    # ---- blocks below ----------------------------------------------------------------------

    def _known(self, request: Request, key: str) -> PrefixBlock | None:
        """A block of the request. If it isn't known, tiers are asked for it and those behind it."""
        if self._seeker is not None:
            if key not in self.blocks.known:
                self._seeker.seeks(request, dropwhile(key.__ne__, self._keys(request)))
            self.blocks.take(self._seeker.found())
        return self.blocks.known.get(key)

    def _is_coming(self, request: Request, block: PrefixBlock | None) -> bool:
        """Whether a block is on its way from a tier, or tiers are asked for it."""
        if self._seeker is None:
            return False
        if block is None:
            return self._seeker.seeks(request, ())
        return block.snapshot is not None and not self._tide.read_ahead(block.snapshot)

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
            chain = hashlib.blake2b("".join(keys[-1:]).encode() + tokens, digest_size=16)
            keys.append(self._key_of(request, chain.hexdigest()))
        return keys[number]
