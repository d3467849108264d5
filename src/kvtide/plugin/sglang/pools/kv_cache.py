"""Common to all of SGLang's pools, by their base class KVCache: slots, pages, a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtide.layout import EveryNth
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools.subject import Subject

READS: Table = {
    "KVCache": ("size", "page_size", "start_layer?"),
    "BaseTokenToKVPoolAllocator": ("page_size",),
    "ParallelContext": ("attn_dcp_size", "attn_dcp_rank"),
}


def described(subject: Subject, *parts: Part) -> Description:
    """Describes a pool of these parts. SGLang pads a pool with a page that no token uses."""
    reads = Reader(subject.pool, READS)
    return Description(
        type(subject.pool).__name__,
        parts,
        reads["page_size"],
        reads["size"] + reads["page_size"],
        first_layer=reads["start_layer"] or 0,
    )


def evenly(pool: Any, *parts: Part) -> tuple[Part, ...]:
    """The parts, which must have equally many layers.

    Raises Refused otherwise: bytes of a layer would be missing.
    """
    counts = {part.name: len(part.tensors) for part in parts}
    if len(set(counts.values())) > 1:
        raise Refused(
            f"{type(pool).__name__}: each of its layers must have a tensor of each kind, and the "
            f"tensors are {counts}"
        )
    return parts


def pages(subject: Subject, name: str, tensors: Sequence[torch.Tensor], tokens: int) -> Part:
    """A part whose rows hold `tokens` consecutive slots each, in any internal order.

    Such rows move as a whole. Raises Refused if a row may hold tokens of two requests.
    """
    page_size = Reader(subject.pool, READS)["page_size"]
    if page_size % tokens:
        raise Refused(
            f"{type(subject.pool).__name__}: {name!r} keeps {tokens} tokens together, but pages of "
            f"{page_size} are given to requests: two of them may share a row, which moves whole"
        )
    return Part(name, tensors, (EveryNth(tokens),))


def share_of_context(subject: Subject) -> tuple[int, int]:
    """(rank, world) among the ranks that divide each context (DCP); (0, 1) if this rank has all.

    SGLang multiplies the allocator's page size by `world`, but not the page size of a pool that has
    a share. A draft model's pool has all tokens and the allocator's page size.
    """
    rank, world = _context_ranks()
    if world == 1:
        return 0, 1
    page_size = Reader(subject.pool, READS)["page_size"]
    widened = page_size * world
    if subject.allocator is not None:
        widened = Reader(subject.allocator, READS)["page_size"]
    if widened == page_size * world:
        return rank, world
    if widened == page_size and page_size % world == 0:
        return 0, 1
    raise Refused(
        f"{type(subject.pool).__name__}: ranks share a context (dcp-size {world}), and its pages "
        f"of {page_size} tokens are neither a rank's share of the allocator's {widened} nor all"
    )


def refuse_shares(subject: Subject) -> None:
    """Raises Refused if ranks divide contexts: SGLang can't write a share of such a pool."""
    _, world = _context_ranks()
    if world > 1:
        raise Refused(
            f"{type(subject.pool).__name__}: ranks share a context (dcp-size {world}), and SGLang "
            "has no way to write one rank's share of what this pool holds"
        )


def _context_ranks() -> tuple[int, int]:
    """(rank, world): this rank among the ranks that decode a context together, and their number."""
    from sglang.srt.runtime_context import get_parallel

    shared = Reader(get_parallel(), READS)
    return int(shared["attn_dcp_rank"]), int(shared["attn_dcp_size"])
