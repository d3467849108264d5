"""SGLang's pools on Ascend NPUs: a tensor holds all layers of a plane, in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvtide.layout import EveryNth, EveryToken, Rule, Striped
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools import kv_cache
from kvtide.plugin.sglang.pools.keys_values import describe_minimax
from kvtide.plugin.sglang.pools.kv_cache import described, evenly, refuse_shares
from kvtide.plugin.sglang.pools.subject import Describer, Subject

READS: Table = {
    **kv_cache.READS,
    "NPUMHATokenToKVPool": ("k_buffer", "v_buffer"),
    "NPUMHATokenToKOnlyPool": ("k_buffer",),
    "NPUMLATokenToKVPool": (
        *("k_buffer?", "v_buffer?", "index_k_buffer?", "index_k_scale_buffer?"),
        *("use_fia_nz", "dsa_kv_cache_store_fp8", "is_draft_worker", "kv_page_padding"),
        *("dcp_size", "dcp_rank"),
    ),
}


def describe_mha(subject: Subject) -> Description:
    """Keys and values of every token, [slot, head, head_dim] in each layer.

    A layer is [page, token, head, head_dim] or, for fused attention (FIA), [slot, 1, head,
    head_dim]; the bytes are the same.
    """
    refuse_shares(subject)
    reads = Reader(subject.pool, READS)
    both = Part("k", _by_slot(reads["k_buffer"])), Part("v", _by_slot(reads["v_buffer"]))
    return described(subject, *evenly(subject.pool, *both))


def describe_k_only(subject: Subject) -> Description:
    """Only keys, with which sparse layers choose tokens."""
    refuse_shares(subject)
    return described(subject, Part("k", _by_slot(Reader(subject.pool, READS)["k_buffer"])))


def describe_mla(subject: Subject) -> Description:
    """Latent and rope in separate planes, and index keys of some layers; [slot, 1, width].

    With fp8 a packed row holds latent and rope, and the second plane is empty. Ranks that decode a
    context together (DCP) take turns by pages, but each has all index keys, and a draft model's
    pool has all tokens.
    """
    reads = Reader(subject.pool, READS)
    if reads["k_buffer"] is None:
        raise Refused(
            "NPUMLATokenToKVPool: SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD keeps the latents in a "
            "manager of its own, on the host; without it the pool has them, and kvtide moves them"
        )
    world, page_size = reads["dcp_size"], reads["page_size"]
    rules: tuple[Rule, ...] = (EveryToken(),)
    if world > 1 and not reads["is_draft_worker"]:
        rules = (Striped(reads["dcp_rank"], world, page_size),)
    index: tuple[Part, ...] = ()
    for name in ("index_k", "index_k_scale"):
        if reads[f"{name}_buffer"] is not None:
            index += (Part(name, _by_slot(reads[f"{name}_buffer"])),)
    planes = (("latent", reads["k_buffer"]), ("rope", reads["v_buffer"]))
    if reads["use_fia_nz"] and not reads["dsa_kv_cache_store_fp8"]:
        # Attention reads a page as [tile, token, 16], so the bytes of a token aren't contiguous.
        latent = tuple(Part(name, all_, (*rules, EveryNth(page_size))) for name, all_ in planes)
    else:
        latent = tuple(Part(name, _by_slot(all_), rules) for name, all_ in planes)
    padded = reads["size"] // page_size + reads["kv_page_padding"]
    turns = 1 if reads["is_draft_worker"] else world
    return replace(
        described(subject, *evenly(subject.pool, *latent), *evenly(subject.pool, *index)),
        slot_count=padded * page_size * turns,
        rank=reads["dcp_rank"],
    )


def _by_slot(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each layer as [slot, …], from [page, token, …] or [slot, 1, …]."""
    return [layer.flatten(0, 1) for layer in layers]


DESCRIBERS: Mapping[str, Describer] = {
    "NPUMHATokenToKVPool": describe_mha,
    "NPUMHATokenToKOnlyPool": describe_k_only,
    "NPUMiniMaxSparseKVPool": describe_minimax,
    "NPUMLATokenToKVPool": describe_mla,
}
