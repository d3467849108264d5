"""What the scheduler hands to the model: one packed step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """One request's share of a packed step.

    ``slots`` holds the slots of the request's positions 0 .. context-1, those of this step
    included, as int64 [context]; its queries are the last ``count`` of them.
    """

    first: int
    """The segment's first packed row."""
    count: int
    """Its query tokens in this step, at least 1."""
    slots: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """The rows of all requests of a step, one after another; every row lies in one segment.

    All tensors are on the host.
    """

    token_ids: Tensor
    """int64 [row]."""
    positions: Tensor
    """int64 [row]: each token's place in its own request."""
    out_slots: Tensor
    """int64 [row]: the slot that each row's keys and values are written to."""
    segments: tuple[Segment, ...]
    """In the order of their rows, without gaps."""
    logit_rows: Tensor
    """int64 [n]: the rows whose logits are wanted, each in ascending order."""


@dataclass(frozen=True)
class RowCounts:
    """The row counts of a pass at which a row's numbers are the same bits, in ascending order.

    A pass of another number of rows is padded up to the next of them; a step of more rows than
    the last runs as several passes.
    """

    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most rows of a pass that requests share."""
        return self.counts[-1]

    def padded(self, rows: int) -> int:
        """The count that so many rows, at most `most`, are padded to; none stay none."""
        return self.counts[bisect_left(self.counts, rows)] if rows else 0

    def __str__(self) -> str:
        """For people: "1 to 64", "4 to 64 in steps of 4", "4 to 12 in steps of 4, 13 to 64"."""
        parts, rest = [], self.counts
        while rest:
            step = rest[1] - rest[0] if len(rest) > 1 else 1
            run = 1
            while run < len(rest) and rest[run] == rest[0] + run * step:
                run += 1
            if run < 3:
                run = 1
            parts.append(_name_run(rest[0], rest[run - 1], step))
            rest = rest[run:]
        return ", ".join(parts)


def _name_run(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {last}" + (f" in steps of {step}" if step > 1 else "")


@dataclass(frozen=True)
class ExactRules:
    """How the passes of exact mode are made up on this machine; the self-check finds it."""

    rows: RowCounts
    """Of the passes of segments that have one query each: answer tokens."""
    chunk_rows: RowCounts
    """Of the passes of longer segments, parts of prompts. Where both are the same, they mix."""
    share_attention: bool = True
    """Whether requests that have one query each may share a call of the attention."""
