"""A packed step: what the scheduler gives to the model. And the row counts of exact mode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.serve.request import Request


@dataclass(frozen=True)
class Segment:
    """The rows of one request in a packed step.

    `slots` holds the slots of all the request's tokens so far, this step's included, as int64
    [context]. The request's queries are its last `count` tokens.
    """

    first: int
    """The segment's first packed row."""
    count: int
    """The number of query tokens in this step, at least 1."""
    slots: Tensor
    of_prompt: bool = False
    """Whether the queries are a prompt's. It matters where there is one: an answer's token is
    computed in another manner than the last token of a prompt that came in several steps."""


@dataclass(frozen=True)
class PackedBatch:
    """The rows of all requests of a step, request after request. Every row is in one segment.

    All tensors are on the host.
    """

    token_ids: Tensor
    """int64 [row]."""
    positions: Tensor
    """int64 [row]: each token's place in its own request."""
    out_slots: Tensor
    """int64 [row]: the slot to which each row's keys and values are written."""
    segments: tuple[Segment, ...]
    """In the order of their rows, without gaps."""
    logit_rows: Tensor
    """int64 [n]: the rows whose logits are wanted, ascending."""


def pack(
    steps: Sequence[tuple[Request, int]], slots_of: Callable[[Request], Tensor]
) -> PackedBatch:
    """Packs a step: the requests, and how many tokens each computes.

    `slots_of` gives the slots of a request's pages, int64. The logits of a request's last row are
    wanted if it is ready then (`Request.is_ready_after`).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for request, count in steps:
        first, stored = len(token_ids), request.stored
        token_ids += request.tokens(stored, count)
        positions += range(stored, stored + count)
        slots = slots_of(request)[: stored + count]
        segments.append(Segment(first, count, slots, stored < len(request.prompt_ids)))
        if request.is_ready_after(count):
            logit_rows.append(first + count - 1)
    return PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.cat([segment.slots[-segment.count :] for segment in segments]),
        tuple(segments),
        torch.tensor(logit_rows, dtype=torch.int64),
    )


@dataclass(frozen=True)
class RowCounts:
    """Row counts of a pass, ascending, at all of which a row's results have the same bits.

    A pass with another row count is padded to the next count in the list. A step with more rows
    than the largest count runs as several passes.
    """

    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most rows of a pass that several requests share."""
        return self.counts[-1]

    def padded(self, rows: int) -> int:
        """The count to which `rows` rows (0 to `most`) are padded. Zero rows stay zero."""
        return self.counts[bisect_left(self.counts, rows)] if rows else 0

    def __str__(self) -> str:
        """For people: "1 to 64", "4 to 64 in steps of 4", "4 to 12 in steps of 4, 13 to 64"."""
        parts, rest = [], self.counts
        while rest:
            step = rest[1] - rest[0] if len(rest) > 1 else 1
            length = 1
            while length < len(rest) and rest[length] == rest[0] + length * step:
                length += 1
            if length < 3:
                length = 1
            parts.append(_range_text(rest[0], rest[length - 1], step))
            rest = rest[length:]
        return ", ".join(parts)


def _range_text(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {last}" + (f" in steps of {step}" if step > 1 else "")


@dataclass(frozen=True)
class ExactRules:
    """The rules for passes in exact mode on this machine, found by the self-check."""

    rows: RowCounts
    """The row counts of passes for answer tokens: segments of one query each."""
    chunk_rows: RowCounts
    """The row counts of passes for chunks of prompts: segments of several queries each. If both
    are equal, the two kinds of segments share passes."""
    share_attention: bool = True
    """Whether requests of one query each may share a call of the attention kernel."""
    query_rows: RowCounts | None = None
    """If a prompt's token gets the same bits however the prompt is cut into steps: how many queries
    a call of attention may have for that. Then all passes of prompts have `chunk_rows`. Otherwise,
    None, a longer chunk is a pass of its own, and a token's bits depend on the chunk that it is
    in."""
