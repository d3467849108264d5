"""Unified memory: SGLang's pools that share a buffer; at any time each byte belongs to one pool.

The rows of a slot in all layers are side by side, so the rows of a layer have gaps between them.
Only SGLang's tables say which rows a slot has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtide.layout import Mapped, Rule, Striped
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools.kv_cache import described, evenly
from kvtide.plugin.sglang.pools.page_table import PageTable
from kvtide.plugin.sglang.pools.recurrent_state import with_state
from kvtide.plugin.sglang.pools.sliding_window import last_tokens
from kvtide.plugin.sglang.pools.subject import Describer, Subject

READS: Table = {
    "KVCache": ("page_size",),
    "MHATokenToKVPool": ("k_buffer", "v_buffer"),
    "MLATokenToKVPool": ("kv_buffer",),
    "SWAKVPool": ("full_kv_pool", "swa_kv_pool", "page_size", "start_layer"),
    "UnifiedSWAKVPool": ("_full_allocator", "_swa_allocator"),
    "HybridLinearKVPool": ("full_kv_pool", "mamba_pool", "start_layer"),
    "UnifiedMambaTokenToKVPoolAllocator": ("full_attn_allocator",),
    "UnifiedSWAAllocatorBase": ("full_attn_allocator", "swa_attn_allocator"),
    "MultiEndedAllocator": ("pool_page_size", "page_size"),
    "UnifiedDraftKVPool": ("host_allocator", "_host_sub_pool_name"),
    "UnifiedDraftSWAKVPool": ("full_kv_pool?", "swa_kv_pool"),
    "ParallelContext": ("attn_dcp_rank",),
}


def describe_rows(subject: Subject) -> Description:
    """Keys and values, or latents, by row. The outer pool knows which row a slot has."""
    reads = Reader(subject.pool, READS)
    if "MLATokenToKVPool" in [base.__name__ for base in type(subject.pool).__mro__]:
        return described(subject, Part("latent", reads["kv_buffer"]))
    both = Part("k", reads["k_buffer"]), Part("v", reads["v_buffer"])
    return described(subject, *evenly(subject.pool, *both))


def describe_unified_hybrid(subject: Subject) -> Description:
    """Keys and values, or latents, of layers with attention; the state of recurrent layers."""
    reads = Reader(subject.pool, READS)
    full = subject.part(reads["full_kv_pool"])
    owner = Reader(_allocator(subject), READS)["full_attn_allocator"]
    joined = replace(
        _by_table(full, owner, "full"),
        name=type(subject.pool).__name__,
        first_layer=reads["start_layer"],
    )
    return with_state(joined, reads["mamba_pool"], subject)


def describe_unified_swa(subject: Subject) -> Description:
    """Layers with full attention and layers with a window; each kind has a table.

    The request pool has the state of such a model, if it has any.
    """
    reads = Reader(subject.pool, READS)
    full, window = subject.part(reads["full_kv_pool"]), subject.part(reads["swa_kv_pool"])
    joined = _by_table(full, reads["_full_allocator"], "full")
    return replace(
        joined,
        name=type(subject.pool).__name__,
        parts=(*joined.parts, *_in_window(subject, window)),
        maps={
            **joined.maps,
            "swa_row": PageTable(reads["_swa_allocator"], "window", may_lack=True),
        },
        first_layer=reads["start_layer"],
    )


def describe_draft(subject: Subject) -> Description:
    """A draft model's keys and values, in the same rows as the target's layers.

    SGLang doesn't copy them.
    """
    reads = Reader(subject.pool, READS)
    where, host = reads["_host_sub_pool_name"], reads["host_allocator"]
    owners = Reader(host, READS)
    rows = describe_rows(subject)
    if where == "swa":
        joined = _by_table(rows, owners["full_attn_allocator"], "full")
        table = PageTable(owners["swa_attn_allocator"], "window", may_lack=True)
        return replace(joined, parts=_in_window(subject, rows), maps={"swa_row": table})
    if where != "full":
        raise Refused(f"{rows.name}: kvtide doesn't know the rows {where!r} that it lies in")
    return _by_table(rows, owners["full_attn_allocator"], "full")


def describe_draft_swa(subject: Subject) -> Description:
    """A draft model with windows: a pool for each kind of layers that it has."""
    reads = Reader(subject.pool, READS)
    sides = [reads["full_kv_pool"], reads["swa_kv_pool"]]
    found = [subject.part(side) for side in sides if side is not None]
    return replace(
        found[0],
        name=type(subject.pool).__name__,
        parts=tuple(part for side in found for part in side.parts),
        maps={name: table for side in found for name, table in side.maps.items()},
    )


def _by_table(rows: Description, owner: Any, name: str) -> Description:
    """The description by virtual slots, which MultiEndedAllocator's table maps to rows."""
    table = PageTable(owner, name)
    reads = Reader(owner, READS)
    # Ranks that share a context count slots in common: `world` times as many as a rank's rows.
    world = reads["page_size"] // reads["pool_page_size"]
    rank = _context_rank() if world > 1 else 0
    turns: tuple[Rule, ...] = (Striped(rank, world),) if world > 1 else ()
    return replace(
        rows,
        parts=rows.renamed(name, *turns, Mapped(f"{name}_row")),
        page_size=reads["page_size"],
        slot_count=table.slot_count * world,
        maps={f"{name}_row": table},
        rank=rank,
        shares_memory=True,
    )


def _in_window(subject: Subject, rows: Description) -> tuple[Part, ...]:
    rules = (*last_tokens(subject, rows.page_size), Mapped("swa_row"))
    return rows.renamed("swa", *rules)


def _allocator(subject: Subject) -> Any:
    if subject.allocator is None:
        raise Refused(
            f"{type(subject.pool).__name__}: only its allocator knows where slots lie, and kvtide "
            "wasn't given it"
        )
    return subject.allocator


def _context_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    rank: Any = Reader(get_parallel(), READS)["attn_dcp_rank"]
    return int(rank)


DESCRIBERS: Mapping[str, Describer] = {
    "UnifiedMHATokenToKVPool": describe_rows,
    "UnifiedMLATokenToKVPool": describe_rows,
    "UnifiedHybridLinearKVPool": describe_unified_hybrid,
    "UnifiedSWAKVPool": describe_unified_swa,
    "UnifiedDraftKVPool": describe_draft,
    "UnifiedDraftSWAKVPool": describe_draft_swa,
}
