"""Pools of latents: SGLang's MLATokenToKVPool and its subclasses, on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvtide.layout import EveryNth, EveryToken, OfRequest, Striped
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools import kv_cache
from kvtide.plugin.sglang.pools.kv_cache import described, evenly, share_of_context
from kvtide.plugin.sglang.pools.subject import Describer, NeverMoved, Subject

READS: Table = {
    **kv_cache.READS,
    "MLATokenToKVPool": ("kv_buffer", "_write_loc_dcp_span"),
    "MLATokenToKVPoolFP4": ("kv_scale_buffer",),
    "DSATokenToKVPool": (
        "index_k_with_scale_buffer",
        "_compress_tail_k?",
        "_compress_tail_score?",
    ),
    "LayerSplitDSATokenToKVPool": ("layer_shard_start", "layer_shard_rank"),
}


def describe_mla(subject: Subject) -> Description:
    """Latent and rope of a token side by side, [slot, 1, latent + rope] in each layer.

    Of ranks that decode a context together (DCP) each has a row for every `world`-th slot, so the
    allocator has `world` times as many slots as a rank has rows.
    """
    reads = Reader(subject.pool, READS)
    rank, world = share_of_context(subject)
    # SGLang's number of slots per row; 1 also for a draft model, whose pool has all tokens.
    if world != reads["_write_loc_dcp_span"]:
        raise Refused(
            f"{type(subject.pool).__name__}: {world} ranks share a context by the allocator's "
            f"pages, but the pool has a row for one of {reads['_write_loc_dcp_span']} slots"
        )
    rule = Striped(rank, world) if world > 1 else EveryToken()
    rows = described(subject, Part("latent", _with_rows(reads["kv_buffer"]), (rule,)))
    return replace(rows, slot_count=rows.slot_count * world, rank=rank)


def describe_mla_fp4(subject: Subject) -> Description:
    """Two values per byte, and a scale for each 16 values, [slot, (latent + rope) / 16]."""
    reads, latent = Reader(subject.pool, READS), describe_mla(subject)
    if reads["_write_loc_dcp_span"] > 1:
        raise Refused(
            "MLATokenToKVPoolFP4: ranks that share a context (dcp-size > 1) write its scales "
            "where SGLang has no rows for them; use another KV dtype, or no DCP"
        )
    scale = Part("scale", reads["kv_scale_buffer"])
    return replace(latent, parts=evenly(subject.pool, *latent.parts, scale))


def describe_dsa(subject: Subject) -> Description:
    """Latents, and in the layers that choose tokens index keys.

    The index keys of a page are in a row: first the keys of all tokens, then their scales. Every
    rank has all of them. If several tokens share an index key (index_kpool), the last tokens wait
    in the row of the request until they are enough for a key.
    """
    reads, latent = Reader(subject.pool, READS), describe_mla(subject)
    keys = _with_rows(reads["index_k_with_scale_buffer"])
    parts = [*latent.parts, Part("index_k", keys, (EveryNth(reads["page_size"]),))]
    if reads["_compress_tail_k"] is not None:
        by_request = (OfRequest("request"),)
        tails = {"tail_k": reads["_compress_tail_k"], "tail_score": reads["_compress_tail_score"]}
        both = [Part(name, _with_rows(tensors), by_request) for name, tensors in tails.items()]
        parts += evenly(subject.pool, *both)
    return replace(latent, parts=tuple(parts))


def describe_layer_split_dsa(subject: Subject) -> Description:
    """Like `describe_dsa`, for the layers of this rank; other layers have no rows here.

    The remote buffers are left out: they hold a copy of another rank's layer for a forward pass.
    """
    reads = Reader(subject.pool, READS)
    return replace(
        describe_dsa(subject),
        first_layer=reads["layer_shard_start"],
        rank=reads["layer_shard_rank"],
    )


def _with_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the layers with rows. For other layers SGLang has an empty tensor."""
    return [tensor for tensor in tensors if tensor.shape[0]]


_PAGES_IN_TURN = (
    "which rank keeps a page depends on where it lies, so to restore it elsewhere the ranks would "
    "have to exchange pages; SGLang uses this pool for prefill alone, where nothing is retracted"
)

DESCRIBERS: Mapping[str, Describer] = {
    "MLATokenToKVPool": describe_mla,
    "MLATokenToKVPoolFP4": describe_mla_fp4,
    "DSATokenToKVPool": describe_dsa,
    "LayerSplitDSATokenToKVPool": describe_layer_split_dsa,
    "HiSparseDSATokenToKVPool": NeverMoved(
        "a request's latents lie in HiSparse's host memory, and SGLang frees them there before it "
        "asks for a copy: nothing is left to save"
    ),
    "PageInterleaveMLATokenToKVPool": NeverMoved(_PAGES_IN_TURN),
    "PageInterleaveDSATokenToKVPool": NeverMoved(_PAGES_IN_TURN),
}
