"""What the scheduler hands to the model: one packed step."""

from __future__ import annotations

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
class RowRange:
    """The row counts of a forward pass within which a row's numbers don't depend on the count.

    ``least`` and ``most`` are included. A pass of fewer rows is padded to ``least``; a step of
    more is run as several passes.
    """

    least: int
    most: int
