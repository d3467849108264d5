"""Pools of keys and values: SGLang's MHATokenToKVPool and its subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtide.layout import EveryToken, Rule, Striped
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools import keys_values_quantized, kv_cache
from kvtide.plugin.sglang.pools.keys_values_quantized import scales
from kvtide.plugin.sglang.pools.kv_cache import (
    described,
    evenly,
    pages,
    refuse_shares,
    share_of_context,
)
from kvtide.plugin.sglang.pools.subject import Describer, NeverMoved, Subject

READS: Table = {
    **kv_cache.READS,
    **keys_values_quantized.READS,
    "MHATokenToKVPool": (
        *keys_values_quantized.READS["MHATokenToKVPool"],
        "kv_cache_layout",
    ),
    "MHATokenToKOnlyPool": ("k_buffer",),
    "MiniMaxSparseKVPool": ("main_pool", "index_kv_pool?", "index_k_pool?"),
}

_PAGED_LAYOUTS = ("hnd", "vectorized_5d")
"""Layouts whose rows are pages: [page, head, token, head_dim], and ROCm's of five axes."""


def describe_mha(subject: Subject) -> Description:
    """Keys and values of every token, [slot, head, head_dim] in each layer, or in pages.

    A quantized pool also has scales. Its dequantized workspace is written in each forward pass, so
    it doesn't belong to a request. Of ranks that decode a context together (DCP) each has a row for
    every `world`-th slot, so the allocator has `world` times as many slots as a rank has rows.
    """
    reads = Reader(subject.pool, READS)
    layout, quantized = reads["kv_cache_layout"], scales(subject)
    if layout != "nhd" or quantized:
        refuse_shares(subject)
    rank, world = share_of_context(subject)
    held = {"k": reads["k_buffer"], "v": reads["v_buffer"]}
    if layout in _PAGED_LAYOUTS:
        size = reads["page_size"]
        parts = [pages(subject, name, tensors, size) for name, tensors in held.items()]
    elif layout == "nhd":
        rule: Rule = Striped(rank, world) if world > 1 else EveryToken()
        parts = [Part(name, tensors, (rule,)) for name, tensors in held.items()]
    else:
        raise Refused(
            f"{type(subject.pool).__name__}: kvtide doesn't know how the layout {layout!r} lies"
        )
    whole = described(subject, *evenly(subject.pool, *parts, *quantized))
    return replace(whole, slot_count=whole.slot_count * world, rank=rank)


def describe_keys(subject: Subject) -> Description:
    """Only keys, [slot, head, head_dim], for an indexer that needs no values."""
    refuse_shares(subject)
    return described(subject, Part("k", Reader(subject.pool, READS)["k_buffer"]))


def describe_minimax(subject: Subject) -> Description:
    """Keys and values of all layers, and those of an indexer in some layers; they share slots."""
    refuse_shares(subject)
    reads = Reader(subject.pool, READS)
    held = {
        "main": reads["main_pool"],
        "index_kv": reads["index_kv_pool"],
        "index_k": reads["index_k_pool"],
    }
    parts = [
        part
        for name, pool in held.items()
        if pool is not None
        for part in subject.part(pool).renamed(name)
    ]
    return described(subject, *parts)


DESCRIBERS: Mapping[str, Describer] = {
    **keys_values_quantized.DESCRIBERS,
    "MHATokenToKVPool": describe_mha,
    "MHATokenToKOnlyPool": describe_keys,
    "MiniMaxSparseKVPool": describe_minimax,
    "MiniMaxM3Nvfp4KVPool": describe_minimax,
    "_DummyKVCache": NeverMoved(
        "on Apple's MLX keys and values lie in arrays of MLX's own, which torch doesn't see"
    ),
    "NoOpMHATokenToKVPool": NeverMoved(
        "it holds no keys and values, only a page that stands in for them: nothing to save"
    ),
    "PageMajorMHATokenToKVPool": NeverMoved(
        "this SGLang can't make such a pool itself; --enable-unified-memory lays pages out like it"
    ),
    "PageInterleaveMHATokenToKVPool": NeverMoved(
        "pages of a request lie on ranks in turn, and begin at another rank when they are given "
        "anew: what this rank saved may then belong on another, which it can't write to; SGLang "
        "uses this pool for prefill alone, where nothing is retracted"
    ),
    "HiSparseMHAMainPool": NeverMoved(
        "a request's keys and values lie in HiSparse's host memory, and SGLang frees them there "
        "before it asks for a copy: nothing is left to save"
    ),
}
