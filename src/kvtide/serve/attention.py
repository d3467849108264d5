"""Attention over pool slots, in plain torch, planned once a step for all layers.

The plan has three kinds of parts. A *span* is several queries of one request (prefill): its context
is gathered and attended to by itself. In exact mode a request's queries are *blocks* instead
(`kvtide.serve.query_blocks`). A *bucket* is one query each of several requests whose contexts are
padded to the same length (decode): one gather and one kernel call serve all of them.

A request's result must not depend on the other requests in its bucket. The padded length depends
on the request's length alone. Padding repeats the request's first slot, and a bias of minus
infinity hides it. torch's CPU kernel computes each (request, head) by itself. But the order of
additions may depend on the thread that computes it and on the place of its numbers in memory,
unless the library was told to repeat its results (`kvtide.serve.repeatable`). So
`kvtide.serve.selfcheck` measures at each start whether a request gets the same bits in every
bucket. If not, each request gets a bucket by itself: its call then has the same shape, on memory
with the same alignment, in every pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtide.serve.batch import RowCounts, Segment
from kvtide.serve.query_blocks import QueryBlocks, attend_blocks, plan_blocks

_FINEST_BLOCK = 64
MOST_IN_BUCKET = 64


class Sharing(Enum):
    """Which requests of one query each share a bucket, of at most 64 requests."""

    ANY = "any"
    """Any requests. Fastest, but results depend on the other requests' lengths."""
    ALIKE = "alike"
    """Requests of the same padded length."""
    NONE = "none"
    """None: each bucket has one request."""


@dataclass(frozen=True)
class Queries:
    """Rows `first .. first+count` are the last queries of one request's context."""

    first: int
    count: int
    slots: Tensor
    """int64 [context]."""
    mask: Tensor | None
    """bool [count, context], true where a query may look; None for a plain causal mask."""

    def to(self, device: torch.device) -> Queries:
        """A copy on that device."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, slots=self.slots.to(device), mask=mask)


@dataclass(frozen=True)
class Bucket:
    """Rows `first .. first+count` are one query each of `count` requests."""

    first: int
    count: int
    slots: Tensor
    """int64 [count * length]: each request's slots, padded to `length`."""
    bias: Tensor
    """[count, 1, 1, length] in the model's dtype: 0 in the context, minus infinity behind it."""

    def to(self, device: torch.device) -> Bucket:
        """A copy on that device."""
        return replace(self, slots=self.slots.to(device), bias=self.bias.to(device))


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of one forward pass; the same for every layer."""

    row_count: int
    """The number of rows, padding included. Padding rows, in no part, get zeros."""
    parts: tuple[Queries | QueryBlocks | Bucket, ...]
    """In the order of their rows, without gaps, from row 0."""

    def to(self, device: torch.device) -> AttentionPlan:
        """A copy on that device."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))


def padded_length(context: int) -> int:
    """The length to which a context is padded for decoding; depends on nothing else.

    It is a multiple of 64 up to 512, and above that of an eighth of the next lower power of two.
    So padding wastes little, and requests of similar lengths still share a bucket.
    """
    block = max(_FINEST_BLOCK, 1 << max(0, (context - 1).bit_length() - 4))
    return -(-context // block) * block


def plan_attention(
    segments: Sequence[Segment],
    row_count: int,
    dtype: torch.dtype,
    *,
    sharing: Sharing = Sharing.ALIKE,
    query_rows: RowCounts | None = None,
) -> AttentionPlan:
    """Plans the attention of one pass. The segments' `first` counts rows of the pass.

    With `query_rows` prompts are computed in blocks of positions, and a call has one of these
    numbers of queries. Other segments of one query must be sorted by `padded_length`; `PagedModel`
    sorts them.
    """
    parts: list[Queries | QueryBlocks | Bucket] = []
    singles: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.count == 1 and not (query_rows and segment.of_prompt):
            singles[padded_length(len(segment.slots))].append(segment)
        elif query_rows:
            parts.append(plan_blocks(segment, dtype, query_rows))
        else:
            parts.append(_queries(segment))
    if sharing is Sharing.ANY and singles:
        singles = {max(singles): [segment for alike in singles.values() for segment in alike]}
    most = 1 if sharing is Sharing.NONE else MOST_IN_BUCKET
    for length, alike in singles.items():
        buckets = (alike[first : first + most] for first in range(0, len(alike), most))
        parts += [_bucket(bucket, length, dtype) for bucket in buckets]
    parts.sort(key=lambda part: part.first)
    return AttentionPlan(row_count, tuple(parts))


def _queries(segment: Segment) -> Queries:
    context = len(segment.slots)
    if context == segment.count:
        return Queries(segment.first, segment.count, segment.slots, None)
    key_position = torch.arange(context, device=segment.slots.device)
    mask = key_position[None] <= key_position[context - segment.count :, None]
    return Queries(segment.first, segment.count, segment.slots, mask)


def _bucket(segments: Sequence[Segment], length: int, dtype: torch.dtype) -> Bucket:
    device = segments[0].slots.device
    slots = torch.empty(len(segments), length, dtype=torch.int64, device=device)
    for row, segment in zip(slots, segments, strict=True):
        context = len(segment.slots)
        row[:context] = segment.slots
        # Padding gathers a slot of the same request, so its numbers are finite.
        row[context:] = segment.slots[0]
    contexts = torch.tensor([len(segment.slots) for segment in segments], device=device)
    beyond = torch.arange(length, device=device)[None] >= contexts[:, None]
    bias = torch.zeros(len(segments), length, dtype=dtype, device=device)
    bias.masked_fill_(beyond, float("-inf"))
    return Bucket(segments[0].first, len(segments), slots.view(-1), bias[:, None, None])


class Workspace:
    """Memory for gathered keys and values, which all layers and steps use again.

    To gather megabytes into fresh memory costs more time in page faults than in copying.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, plane: Tensor, slots: Tensor) -> Tensor:
        """`plane[slots]`, [slot, head, dim]; valid until the next call with the same `name`."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < len(slots) or buffer.shape[1:] != plane.shape[1:]:
            buffer = plane.new_empty(len(slots) * 5 // 4, *plane.shape[1:])
            self._buffers[name] = buffer
        return torch.index_select(plane, 0, slots, out=buffer[: len(slots)])


def attend(
    plan: AttentionPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    workspace: Workspace,
) -> Tensor:
    """Attention of one layer: query [row, head, dim], planes [slot, kv_head, dim].

    Returns [row, head, v_dim]. Changes only `workspace`.
    """
    outputs = []
    done = 0
    for part in plan.parts:
        k = workspace.gather("k", keys, part.slots)
        v = workspace.gather("v", values, part.slots)
        rows = query[part.first : part.first + part.count]
        if len(rows) < len(query) and not isinstance(part, QueryBlocks):
            rows = rows.clone()  # its place in memory must not depend on the other rows
        if isinstance(part, QueryBlocks):
            outputs.append(attend_blocks(part, rows, k, v, scale))
        elif isinstance(part, Queries):
            outputs.append(_attend_queries(part, rows, k, v, scale))
        else:
            outputs.append(_attend_bucket(part, rows, k, v, scale))
        done += part.count
    if done < plan.row_count:
        outputs.append(query.new_zeros(plan.row_count - done, query.shape[1], values.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_queries(part: Queries, query: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_bucket(bucket: Bucket, query: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    count, kv_heads = bucket.count, k.shape[1]
    # Queries that share a key head are neighbours, and become rows of that head.
    grouped = query.reshape(count, kv_heads, -1, query.shape[-1])
    out = scaled_dot_product_attention(
        grouped,
        k.view(count, -1, *k.shape[1:]).transpose(1, 2),
        v.view(count, -1, *v.shape[1:]).transpose(1, 2),
        attn_mask=bucket.bias,
        scale=scale,
    )
    return out.reshape(count, query.shape[1], v.shape[-1])
