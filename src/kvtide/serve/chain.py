"""Chain: which tokens of a request are shared, in which blocks, and under which keys."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from kvtide.serve.request import Request

NO_BLOCKS = 1 << 62
"""A block of so many tokens is never full, so nothing is shared."""


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks into which the tokens of requests are cut.

    A block's key is made by `key_of`, of the request and a hash of the block's tokens and of the
    key before it. So blocks with one key have the same tokens before them. Before the first block
    is the key of no tokens, which differs between tenants. A block has `block_tokens` tokens, and a
    tail at least `least_tokens`: there are none if the two are the same.
    """

    key_of: Callable[[Request, str], str]
    block_tokens: int
    least_tokens: int
    shares_answers: bool

    def parent(self, request: Request, number: int) -> str:
        """The key of what is before the request's block with that number, from 0 on."""
        keys = request.block_keys
        if not keys:
            keys.append(self.key_of(request, ""))
        while len(keys) <= number:
            keys.append(self.key_after(request, keys[-1], self.tokens(request, len(keys) - 1)))
        return keys[number]

    def key(self, request: Request, number: int) -> str:
        """The key of the request's whole block with that number."""
        return self.parent(request, number + 1)

    def keys(self, request: Request, first: int = 0) -> Iterator[str]:
        """The keys of the whole blocks that the request may read, made as they are asked for."""
        count = self.most(request) // self.block_tokens
        return (self.key(request, number) for number in range(first, count))

    def key_after(self, request: Request, parent: str, tokens: Sequence[int]) -> str:
        """The key of a block of these tokens, which may be a tail, after what has `parent`."""
        text = parent.encode() + array("q", tokens).tobytes()
        return self.key_of(request, hashlib.blake2b(text, digest_size=16).hexdigest())

    def tokens(self, request: Request, number: int, end: int | None = None) -> tuple[int, ...]:
        """The tokens of the request's block with that number, or those of them before `end`."""
        first = number * self.block_tokens
        last = first + self.block_tokens if end is None else min(first + self.block_tokens, end)
        return tuple(request.tokens(first, max(0, last - first)))

    def tail_keys(self, request: Request, number: int) -> Iterator[str]:
        """The keys of blocks that end as the request's block or before, the longest first.

        The longest may have the request's last token, too: then all but that one is of use.
        """
        parent = self.parent(request, number)
        tokens = self.tokens(request, number, self.end(request))
        counts = range(len(tokens), self.least_tokens - 1, -1)
        return (self.key_after(request, parent, tokens[:count]) for count in counts)

    def most(self, request: Request) -> int:
        """How many tokens a request may read at most. The last one is computed: for its logits."""
        return min(request.token_count - 1, self.end(request))

    def end(self, request: Request) -> int:
        """How many tokens have KV that may be shared once they have KV."""
        return request.token_count if self.shares_answers else len(request.prompt_ids)
