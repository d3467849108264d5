"""Finder: which block has most of what a request computes next, here or in tiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from kvtide.serve.blocks import Blocks
from kvtide.serve.branches import Branches
from kvtide.serve.chain import NO_BLOCKS, Chain
from kvtide.serve.request import PrefixBlock, Request
from kvtide.serve.seeker import Seeker, Sought
from kvtide.snapshot import Snapshot
from kvtide.tier import Spill

_WORTH_TOKENS = 8
"""Fewer tokens are sooner computed than copied or waited for, unless they are a whole tail."""


@final
class Finder:
    """Finds blocks for requests; with a `spill` also those that other engines left in its tiers."""

    def __init__(self, chain: Chain, blocks: Blocks, spill: Spill | None) -> None:
        self._chain = chain
        self._blocks = blocks
        self._spill = spill
        self._seeker = None if spill is None else Seeker(spill)

    def best(self, request: Request, number: int | None = None) -> tuple[PrefixBlock | None, int]:
        """The block that has most of the tokens of the request's block, and how many of them.

        By default of the one behind those that it reads. If none has all of them, tiers are asked.
        """
        number = len(request.blocks) if number is None else number
        tokens = self._chain.tokens(request, number, self._chain.most(request))
        block, count = self._nearest(request, number, tokens)
        if self._seeker is not None and count < len(tokens):
            self._seek(request, number)
            self._take_found()
            block, count = self._nearest(request, number, tokens)
        return block, count

    def coming(self, request: Request) -> Iterator[PrefixBlock]:
        """The blocks that a request reads when it starts, as far as they are known."""
        number, count = 0, self._chain.block_tokens
        while self._spill is not None and count == self._chain.block_tokens < NO_BLOCKS:
            # Each step asks this, so tokens are compared only behind the last block that is known.
            block = self._whole(request, number)
            if block is None:
                block, count = self.best(request, number)
            if block is not None:
                yield block
            number += 1

    def is_here(self, block: PrefixBlock) -> bool:
        """Whether a block needn't be waited for. Otherwise it is read ahead, if it has room."""
        snapshot = block.snapshot
        return snapshot is None or self._spill is None or self._spill.read_ahead(snapshot)

    def had_better_wait(
        self, request: Request, block: PrefixBlock | None, count: int, step: Branches | None
    ) -> bool:
        """Whether the request may soon have more than the `count` tokens that `block` has.

        They may come from a tier, as those of the block may, or others compute them in a step.
        """
        if step is not None and self._is_computed(request, count, step):
            return True
        if self._seeker is None:
            return False
        if block is not None and self._is_coming(block):
            return self._seeker.may_wait(request, block.key)
        return self._is_sought(request, count) and self._seeker.may_wait(request, None)

    def note_progress(self, request: Request) -> None:
        """The request waits no longer for the block that it waited for, if it did."""
        if self._seeker is not None:
            self._seeker.note_progress(request)

    def forget(self, request: Request) -> None:
        """Forgets a request in any state; it may be searched for anew."""
        if self._seeker is not None:
            self._seeker.forget(request)

    def pause(self) -> None:
        """Waits a moment: all requests wait for blocks."""
        assert self._seeker is not None, "otherwise nobody waits"
        self._seeker.pause()

    # ---- what is known here --------------------------------------------------------------

    def _nearest(
        self, request: Request, number: int, tokens: tuple[int, ...]
    ) -> tuple[PrefixBlock | None, int]:
        """The known block that has most of `tokens`, which the request's block begins with."""
        whole = self._whole(request, number)
        if whole is not None:
            return whole, len(tokens)
        key, count = self._blocks.branches.closest(self._chain.parent(request, number), tokens)
        if key is not None and count >= self._least(self._blocks.known[key].tokens):
            return self._blocks.known[key], count
        return None, 0

    def _whole(self, request: Request, number: int) -> PrefixBlock | None:
        """The known block that has all tokens of the request's block, if it may read them all."""
        if (number + 1) * self._chain.block_tokens > self._chain.most(request):
            return None
        return self._blocks.known.get(self._chain.key(request, number))

    def _is_computed(self, request: Request, count: int, step: Branches) -> bool:
        """Whether a step computes more of what the request computes next than `count` tokens."""
        number = len(request.blocks)
        tokens = self._chain.tokens(request, number, self._chain.most(request))
        _, computed = step.closest(self._chain.parent(request, number), tokens)
        return computed - count >= self._least(tokens)

    def _least(self, tokens: tuple[int, ...]) -> int:
        """How many of the tokens make it worth while to copy them, or to wait for them."""
        return max(self._chain.least_tokens, min(_WORTH_TOKENS, len(tokens)))

    # ---- what is in tiers ----------------------------------------------------------------

    def _seek(self, request: Request, number: int) -> None:
        """Has tiers asked for the request's blocks from that number on, and a tail behind them."""
        assert self._seeker is not None, "there are tiers"
        if self._seeker.has_sought(request):
            return
        chain = self._chain

        def tails_at(place: int) -> Iterator[str]:
            return chain.tail_keys(request, number + place)

        names = [*chain.keys(request, number)]
        self._seeker.seek(Sought(request, number, names, tails_at))

    def _take_found(self) -> None:
        """Makes blocks of what tiers have, as requests have asked."""
        assert self._seeker is not None, "there are tiers"
        for sought, snapshots in self._seeker.found():
            places = enumerate(snapshots, sought.first)
            self._blocks.take([self._found(sought.request, *found) for found in places])

    def _found(self, request: Request, number: int, snapshot: Snapshot) -> PrefixBlock:
        """The block of that number of a request, as a snapshot with that many tokens would be."""
        first = number * self._chain.block_tokens
        tokens = self._chain.tokens(request, number, first + snapshot.token_count)
        parent = self._chain.parent(request, number)
        key = self._chain.key_after(request, parent, tokens)
        return PrefixBlock(key, parent, tokens, [], snapshot)

    def _is_coming(self, block: PrefixBlock) -> bool:
        """Whether a block is on its way from a tier."""
        assert self._spill is not None, "there are tiers"
        return block.snapshot is not None and self._spill.is_coming(block.snapshot)

    def _is_sought(self, request: Request, count: int) -> bool:
        """Whether tiers are asked for more than the `count` tokens that are known."""
        assert self._seeker is not None, "there are tiers"
        is_all = count == self._chain.block_tokens or (
            request.stored + count == self._chain.most(request)
        )
        return not is_all and self._seeker.is_seeking(request)
