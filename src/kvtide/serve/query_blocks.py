"""Attention of prompts in blocks of positions: a token's bits don't depend on how a prompt is cut.

A kernel's order of additions depends on the numbers of queries and keys in a call. If a call has
the queries of one step, then a token's bits depend on where that step began and ended. So here a
call has the queries of a *block*: positions `32 * n` to `32 * (n + 1)`, over the keys from position
0 to the block's end. Its shape depends on `n` alone. Queries of the block that aren't wanted now
are zeros. Keys behind the last stored token are those of another token of the request, which are
finite, and a bias of minus infinity hides them.

That leaves one assumption, which `kvtide.serve.selfcheck` measures at each start: in a call of one
shape a query's result doesn't depend on the other queries, nor on keys that are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtide.serve.batch import Segment

QUERY_ROWS = 32
"""The queries of a block. Few cost little where only one is wanted; fewer would cost more calls."""


@dataclass(frozen=True)
class QueryBlocks:
    """Rows `first .. first+count` are the last queries of one request's context."""

    first: int
    count: int
    start: int
    """The position of the first query."""
    slots: Tensor
    """int64 [end]: the context's slots, padded to the end of the last block."""
    bias: Tensor
    """In the model's dtype: for each block [QUERY_ROWS, keys], flat, one block after another."""

    def to(self, device: torch.device) -> QueryBlocks:
        """A copy on that device."""
        return replace(self, slots=self.slots.to(device), bias=self.bias.to(device))


def plan_blocks(segment: Segment, dtype: torch.dtype) -> QueryBlocks:
    """The blocks in which the segment's queries lie."""
    context = len(segment.slots)
    start = context - segment.count
    ends = range(start // QUERY_ROWS * QUERY_ROWS + QUERY_ROWS, context + QUERY_ROWS, QUERY_ROWS)
    padding = segment.slots[:1].expand(ends[-1] - context)
    device = segment.slots.device
    triangle = torch.full((QUERY_ROWS, QUERY_ROWS), float("-inf"), dtype=dtype, device=device)
    triangle = triangle.triu(1)
    bias = [
        torch.cat([triangle.new_zeros(QUERY_ROWS, end - QUERY_ROWS), triangle], 1).flatten()
        for end in ends
    ]
    slots = torch.cat([segment.slots, padding])
    return QueryBlocks(segment.first, segment.count, start, slots, torch.cat(bias))


def attend_blocks(
    part: QueryBlocks, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attention of query [count, head, dim] over keys and values [end, kv_head, dim].

    Returns [count, head, v_dim].
    """
    skipped = part.start % QUERY_ROWS
    before = part.start - skipped
    rows = query.new_zeros(len(keys) - before, *query.shape[1:])
    rows[skipped : skipped + part.count] = query
    found = []
    used = 0
    for end in range(before + QUERY_ROWS, len(keys) + 1, QUERY_ROWS):
        block = rows[end - QUERY_ROWS - before : end - before]
        bias = part.bias[used : used + QUERY_ROWS * end].view(QUERY_ROWS, end)
        used += QUERY_ROWS * end
        out = scaled_dot_product_attention(
            block.transpose(0, 1)[None],
            keys[:end].transpose(0, 1)[None],
            values[:end].transpose(0, 1)[None],
            attn_mask=bias,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)[skipped : skipped + part.count]


def cut(segment: Segment, most: int) -> list[Segment]:
    """The segment in pieces of at most `most` rows, in order.

    A piece ends where a block does, if it can, so that no block is computed twice.
    """
    if segment.count <= most:
        return [segment]
    context = len(segment.slots)
    start = begin = context - segment.count
    pieces: list[Segment] = []
    while begin < context:
        aligned = (begin + most) // QUERY_ROWS * QUERY_ROWS
        end = min(context, aligned if aligned > begin else begin + most)
        piece = Segment(segment.first + begin - start, end - begin, segment.slots[:end], True)
        pieces.append(piece)
        begin = end
    return pieces
