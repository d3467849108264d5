"""Attention of prompts in blocks of positions: a token's bits don't depend on how a prompt is cut.

A kernel's order of additions depends on the numbers of queries and keys in a call. If a call has
the queries of one step, then a token's bits depend on where that step began and ended. So here a
call has the queries of a *block*: positions `32 * n` to `32 * (n + 1)`, over the keys from position
0 to the block's end. Its number of keys depends on `n` alone. Keys behind the last stored token are
those of another token of the request, which are finite, and a bias of minus infinity hides them.

A step may want only some queries of a block. Then the call has as few queries as the self-check
allows: it measures which numbers of queries give the same bits as the whole block. Queries that
aren't wanted now are zeros. In a call of the whole block each query has its own place.

That leaves one assumption, which `kvtide.serve.selfcheck` measures at each start: in a call of one
shape a query's result doesn't depend on the other queries, nor on keys that are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtide.serve.batch import RowCounts, Segment

QUERY_ROWS = 32
"""The queries of a block. Fewer would cost more calls."""
WHOLE_BLOCKS = RowCounts((QUERY_ROWS,))
"""Each call has all queries of its block."""


@dataclass(frozen=True)
class BlockCall:
    """A call of the kernel: some queries of a block, of which `wanted` were asked for."""

    first: int
    """The first wanted query, counted in the part."""
    wanted: int
    skipped: int
    """How many queries of the call, zeros, come before it."""
    bias: Tensor
    """In the model's dtype, [queries, keys]."""

    def queries(self, rows: Tensor) -> Tensor:
        """The queries of the call, [queries, head, dim], from those of the part.

        It is a copy, so that its place and order in memory don't depend on other rows.
        """
        queries = rows.new_zeros(len(self.bias), *rows.shape[1:])
        wanted = rows[self.first : self.first + self.wanted]
        queries[self.skipped : self.skipped + self.wanted] = wanted
        return queries


@dataclass(frozen=True)
class QueryBlocks:
    """Rows `first .. first+count` are the last queries of one request's context."""

    first: int
    count: int
    slots: Tensor
    """int64 [end]: the context's slots, padded to the end of the last block."""
    calls: tuple[BlockCall, ...]
    """In the order of their rows."""

    def to(self, device: torch.device) -> QueryBlocks:
        """A copy on that device."""
        calls = tuple(replace(call, bias=call.bias.to(device)) for call in self.calls)
        return replace(self, slots=self.slots.to(device), calls=calls)


def plan_blocks(segment: Segment, dtype: torch.dtype, counts: RowCounts) -> QueryBlocks:
    """The calls for the segment's queries, each with one of these numbers of queries."""
    context = len(segment.slots)
    start = context - segment.count
    calls: list[BlockCall] = []
    for begin in range(start // QUERY_ROWS * QUERY_ROWS, context, QUERY_ROWS):
        first, last = max(start, begin), min(context, begin + QUERY_ROWS)
        count = counts.padded(last - first)
        top = min(first, begin + QUERY_ROWS - count)
        bias = _bias(top - begin, count, begin, dtype).to(segment.slots.device)
        calls.append(BlockCall(first - start, last - first, first - top, bias))
    padding = segment.slots[:1].expand(calls[-1].bias.shape[1] - context)
    slots = torch.cat([segment.slots, padding])
    return QueryBlocks(segment.first, segment.count, slots, tuple(calls))


def _bias(first: int, count: int, earlier: int, dtype: torch.dtype) -> Tensor:
    """The bias of `count` queries of a block from its query `first` on, [count, keys]."""
    bias = torch.zeros(count, earlier + QUERY_ROWS, dtype=dtype)
    hidden = torch.full((count, QUERY_ROWS), float("-inf"), dtype=dtype)
    bias[:, earlier:] = hidden.triu(first + 1)
    return bias


def attend_blocks(
    part: QueryBlocks, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attention of query [count, head, dim] over keys and values [end, kv_head, dim].

    Returns [count, head, v_dim].
    """
    found = []
    for call in part.calls:
        queries, end = call.queries(query), call.bias.shape[1]
        attend_call = _attend if len(queries) == QUERY_ROWS else _attend_few
        out = attend_call(queries, keys[:end], values[:end], call.bias, scale)
        found.append(out[call.skipped : call.skipped + call.wanted])
    return found[0] if len(found) == 1 else torch.cat(found)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=bias,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_few(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """The same for a few queries. Those that share a key head are its rows, which is quicker."""
    count, heads, kv_heads = len(query), query.shape[1], keys.shape[1]
    rows = query.reshape(count, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
    out = scaled_dot_product_attention(
        rows.reshape(1, kv_heads, -1, query.shape[-1]),
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=bias.repeat(heads // kv_heads, 1),
        scale=scale,
    )
    out = out.view(kv_heads, heads // kv_heads, count, -1)
    return out.permute(2, 0, 1, 3).reshape(count, heads, -1)


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
