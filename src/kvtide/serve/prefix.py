"""PrefixCache: requests that begin with the same tokens share the KV of these tokens.

Tokens are shared in blocks of one size, which fill whole pages. A block's key is a hash of its
tokens and of the key before it, and of all else that decides its bytes, such as the model and the
tenant. So blocks with one key have the same tokens before them, and other engines find them.

A request reads its blocks from the first one on, and lets the last one go first. So no block leaves
before those that are of no use without it. `kvtide.serve.blocks` has the places of blocks.

What a request leaves behind its last whole block is a *tail*: a block of fewer tokens. Whoever goes
on from there writes behind it, so a tail has one reader: the next request takes its pages over, or
copies the tokens while they are another's. Of a block that only begins right, tokens are copied,
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import lcm
from typing import final

from kvtide.pool import PageAllocator
from kvtide.serve.blocks import Blocks, PrefixStats
from kvtide.serve.branches import Branches
from kvtide.serve.chain import NO_BLOCKS, Chain
from kvtide.serve.finder import Finder
from kvtide.serve.request import PrefixBlock, Request
from kvtide.tide import Tide
from kvtide.tier import Spill

_FEW_TOKENS = 64
"""About how many tokens a block has: small ones would waste the arena's blocks."""


def block_tokens_for(chunk_tokens: int, page_size: int, *, whole_chunks: bool) -> int:
    """How many tokens a block has: whole pages, and with `whole_chunks` whole chunks of prompts.

    Whole chunks are needed where the bits of a prompt's token depend on the chunk that it is in
    (`ExactRules.query_rows`): all requests compute a prompt's full chunks in the same manner, but
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
        shares_tails: bool = True,
        below_bytes: int = 0,
        spill: Spill | None = None,
    ) -> None:
        """A block has `block_tokens` tokens, whole pages; 0 shares nothing.

        `key_of` gives the key of a request's block from a hash of its tokens and of those before
        them. Requests that may share have the same. With `shares_answers` answers are shared like
        prompts. Without `shares_tails` only whole blocks are shared. Blocks that leave the device
        go to the arena, and by its `spill` to tiers: those that this cache knows take at most
        `below_bytes`. In tiers they stay for other engines.
        """
        self.blocks = Blocks(tide, pages, below_bytes, spill)
        self._tide = tide
        self._pages = pages
        self._block_tokens = block_tokens or NO_BLOCKS
        self._block_pages = block_tokens // tide.pool.page_size
        least_tokens = 1 if shares_tails and block_tokens else self._block_tokens
        self._chain = Chain(key_of, self._block_tokens, least_tokens, shares_answers)
        self._spill = spill
        self._finder = Finder(self._chain, self.blocks, spill if below_bytes else None)

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
        for block in request.awaited or self._finder.coming(request):
            if block.snapshot is not None:
                self._tide.read_ahead(block.snapshot)

    def pause(self) -> None:
        """Waits a moment, when all requests wait for blocks."""
        self._finder.pause()

    # ---- what a request reads ------------------------------------------------------------

    def read(self, request: Request, step: Branches | None = None) -> bool:
        """Gives the request, which runs, the blocks that go on from what it has.

        False if it had better wait than compute its next tokens: they may come from a tier soon, or
        others compute them in this `step`, which `note_step` has told. Never waits itself, but for
        a moment. Without a `step` it gives whole blocks alone, which take no pages.
        """
        while self._can_read_next(request):
            block, count = self._finder.best(request)
            if step is None and count < self._block_tokens:
                return True
            is_here = block is None or self._finder.is_here(block)
            if self._finder.had_better_wait(request, block, count, step):
                return False
            if block is None or not is_here or not self._give(request, block, count):
                return True
        return True

    def _give(self, request: Request, block: PrefixBlock, token_count: int) -> bool:
        """Gives a request the first tokens of a block; False if they can't be had."""
        is_given = False
        self.blocks.hold(block)
        try:
            source = self.blocks.bring(block)
            is_given = source is not None and self._enter(request, block, token_count)
        finally:  # also if a copy fails in a way of which no code knows
            if not is_given:
                self.blocks.let_go(block)
        if source is None or not is_given:
            return False
        self._finder.note_progress(request)
        request.stored += token_count
        # What the request had before it lost its KV isn't counted again.
        new_count = max(0, min(token_count, request.stored - request.lost))
        request.cached_tokens += new_count
        if new_count:
            self.blocks.stats.cached_tokens[source] += new_count
        return True

    def _enter(self, request: Request, block: PrefixBlock, token_count: int) -> bool:
        """Puts a block, which is held and on the device, into the request's pages.

        A whole block is shared. The pages of a tail become the request's own if nobody else needs
        them, since it goes on writing there. Otherwise it gets a copy; False if that has no room.
        """
        if token_count == self._block_tokens:
            request.blocks.append(block)
            request.pages += block.pages
        elif token_count == len(block.tokens) and block.readers == 1:
            request.pages += self.blocks.hand_over(block)
        else:
            pages = self.blocks.copied(block, token_count)
            if pages is None:
                return False
            request.pages += pages
            self.blocks.let_go(block)
        return True

    def let_wait(self, request: Request) -> None:
        """Takes the blocks of a request that is retracted; it gets them again by `read_again`."""
        for block in request.blocks:
            block.waiters += 1
        request.awaited = request.blocks
        self.release(request)

    def read_again(self, request: Request) -> bool:
        """Gives a request that was retracted its blocks again; False, and none, if one is lost.

        After an error it still awaits them all.
        """
        keys = [block.key for block in request.awaited]
        blocks = [self.blocks.known[key] for key in keys if key in self.blocks.known]
        are_here = False
        for block in blocks:  # all of them first: room for one must not cost another
            self.blocks.hold(block)
        try:
            are_here = len(blocks) == len(keys) and all(map(self.blocks.bring, blocks))
        finally:
            if not are_here:
                for block in reversed(blocks):
                    self.blocks.let_go(block)
        self._stop_waiting(request)
        if not are_here:
            return False
        request.blocks = blocks
        request.pages = [page for block in blocks for page in block.pages]
        return True

    def share(self, request: Request) -> None:
        """Makes blocks of what the request has computed. They hold their pages from now on.

        Where a block has the same key the request takes it, and gives its pages back. A prompt's
        end is a tail as soon as it is computed.
        """
        end = min(request.stored, self._chain.end(request))
        while (len(request.blocks) + 1) * self._block_tokens <= end:
            self.withdraw(request)
            self._share_next(request)
        if request.stored == len(request.prompt_ids):
            self._make_tail(request)

    def withdraw(self, request: Request) -> None:
        """Lets nobody copy the end of the request's prompt any more."""
        if request.tail is not None:
            self.blocks.hand_over(request.tail)
            request.tail = None

    def release(self, request: Request) -> None:
        """Gives back all pages of a request: its share of those that it reads, and its own.

        What it has computed behind its blocks stays as a tail.
        """
        self._make_tail(request)
        left = [] if request.tail is None else request.tail.pages
        self._pages.release(page for page in self.pages_of(request) if page not in left)
        for block in (*filter(None, [request.tail]), *reversed(request.blocks)):
            self.blocks.let_go(block)
        request.blocks, request.pages, request.tail = [], [], None

    def _share_next(self, request: Request) -> None:
        """Makes a block of the request's first own pages."""
        number = len(request.blocks)
        part = slice(number * self._block_pages, (number + 1) * self._block_pages)
        key, pages = self._chain.key(request, number), request.pages[part]
        block = self.blocks.known.get(key)
        if block is not None and not block.pages:
            self.blocks.drop(block)
            block = None
        if block is None:
            parent = self._chain.parent(request, number)
            tokens = self._chain.tokens(request, number)
            block = self.blocks.add(PrefixBlock(key, parent, tokens, pages))
        else:
            request.pages[part] = block.pages
            self._pages.release(pages)
        self.blocks.hold(block)
        request.blocks.append(block)

    def _make_tail(self, request: Request) -> None:
        """Makes a tail of what the request has computed behind its blocks, unless there is one."""
        number, pages = len(request.blocks), self.pages_of(request)
        end = min(request.stored, self._chain.end(request))
        if not pages or end - number * self._block_tokens < self._chain.least_tokens:
            return
        tokens = self._chain.tokens(request, number, end)
        if request.tail is not None and request.tail.tokens == tokens:
            return
        self.withdraw(request)
        parent = self._chain.parent(request, number)
        key = self._chain.key_after(request, parent, tokens)
        known = self.blocks.known.get(key)
        if known is not None and known.pages:
            return
        if known is not None:
            self.blocks.drop(known)
        pages = pages[: self.blocks.page_count_for(len(tokens))]
        request.tail = self.blocks.add(PrefixBlock(key, parent, tokens, pages))
        self.blocks.hold(request.tail)

    def forget(self, request: Request) -> None:
        """Releases a request that needs nothing any more of what it had."""
        self.release(request)
        self._stop_waiting(request)
        self._finder.forget(request)

    def pages_of(self, request: Request) -> list[int]:
        """The pages that the request alone holds, which come after those of its blocks."""
        return request.pages[len(request.blocks) * self._block_pages :]

    def page_count_of_all(self, requests: Sequence[Request]) -> int:
        """How many pages could be had if these requests, which run, held none."""
        shared_count = sum(count == block.readers for block, count in _readers(requests).items())
        own_count = sum(len(self.pages_of(request)) for request in requests)
        return own_count + shared_count * self._block_pages

    def token_count_of(self, request: Request) -> int:
        """The tokens in the blocks that the request reads: its first ones."""
        return len(request.blocks) * self._block_tokens

    def common_page_count(self, request: Request, leaving: Sequence[Request] = ()) -> int:
        """Pages of the request's first tokens that others hold, so that it needs none for them.

        Those that are `leaving` don't count as others. Of a request with a snapshot only the blocks
        that aren't in it count: the others come back to pages of its own.
        """
        awaited = (block.key for block in request.awaited)
        keys = self._chain.keys(request) if request.snapshot is None else awaited
        gone = _readers(leaving)
        count = 0
        for block in map(self.blocks.known.get, keys):
            if block is None or not (block.readers > gone[block] and block.pages):
                break
            count += 1
        return count * self._block_pages

    def note_step(self, request: Request, token_count: int, step: Branches) -> None:
        """Puts the next `token_count` tokens of the request, which a step computes, into `step`."""
        if self._block_tokens == NO_BLOCKS:
            return
        end = min(request.stored + token_count, self._chain.end(request))
        for number in range(request.stored // self._block_tokens, -(-end // self._block_tokens)):
            tokens = self._chain.tokens(request, number, end)
            step.add(self._chain.parent(request, number), tokens, request.id)

    # ---- which tokens are shared -----------------------------------------------------------

    def _stop_waiting(self, request: Request) -> None:
        for block in request.awaited:
            block.waiters -= 1
        request.awaited = []

    def _can_read_next(self, request: Request) -> bool:
        """Whether the request is at the end of its blocks, and its next tokens may be shared."""
        stored = request.stored
        return (
            stored + self._chain.least_tokens <= self._chain.most(request)
            and stored == self.token_count_of(request)
            and stored == len(request.pages) * self._tide.pool.page_size
        )


def _readers(requests: Sequence[Request]) -> Counter[PrefixBlock]:
    """For each block how many of these requests read it."""
    return Counter(block for request in requests for block in request.blocks)
