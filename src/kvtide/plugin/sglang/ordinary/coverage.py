"""Lists the servers and the requests that can't resume from saved KV, with reasons.

kvtide leaves them to SGLang, which computes the KV again. Most of them keep state of a request
outside of the pools that kvtide knows, or schedule in an unknown manner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang import unseen_results
from kvtide.plugin.sglang.ordinary import allocation, resume
from kvtide.plugin.sglang.package import name_of

Cases = tuple[tuple[Callable[[Reader], bool], str], ...]
"""Pairs of a condition and the reason why kvtide doesn't cover it."""

READS: Table = {
    "Scheduler": (
        *("disaggregation_mode", "server_args", "model_config", "spec_algorithm", "tree_cache"),
        *("token_to_kv_pool_allocator", "req_to_token_pool", "kv_shard_widening"),
        *(
            "require_mlp_sync",
            "enable_pdmux",
            "enable_overlap_mlx",
            "enable_lora_overlap_loading?",
            "enable_hisparse",
        ),
        *("enable_hierarchical_cache", "enable_lmcache", "enable_unified_memory"),
        *("enable_unified_cache_external_linker", "is_hybrid_swa"),
        *("dllm_config?", "use_ngram_embedding", "prefill_delayer?"),
    ),
    "ServerArgs": (
        "pp_size",
        "dcp_size?",
        "enable_pd_role_switch",
        "enable_watermark",
        "kv_canary",
    ),
    "ModelConfig": ("is_encoder_decoder", "use_engram"),
    "Req": (
        *("beam_group?", "input_embeds?", "positional_embed_overrides?"),
        *("session?", "return_routed_experts?", "return_indexer_topk?"),
        *("inflight_middle_chunks", "output_ids"),
    ),
}

ALLOCATORS = frozenset(
    {
        "TokenToKVPoolAllocator",
        "PagedTokenToKVPoolAllocator",
        "NPUPagedTokenToKVPoolAllocator",
        "SWATokenToKVPoolAllocator",
    }
)
"""Allocators from which `allocation` can get everything that a request's tokens need."""

TABLES = frozenset({"ReqToTokenPool", "HybridReqToTokenPool"})
"""Tables of requests' slots, and of their recurrent states."""

TREES = frozenset({"RadixCache", "UnifiedRadixCache"})
"""Prefix caches that accept a request without a shared prefix."""

_KNOWN = {
    "token_to_kv_pool_allocator": ALLOCATORS,
    "req_to_token_pool": TABLES,
    "tree_cache": TREES,
}

_SERVERS: Cases = (
    (lambda reads: reads["disaggregation_mode"].value != "null", "disaggregated serving"),
    (lambda reads: reads["enable_pdmux"], "multiplexed prefill and decode"),
    (lambda reads: reads["enable_overlap_mlx"], "MLX's own overlap"),
    (lambda reads: reads["require_mlp_sync"], "attention in data parallel"),
    (lambda reads: not reads["spec_algorithm"].is_none(), "speculative decoding"),
    (lambda reads: reads["dllm_config"] is not None, "diffusion language models"),
    (lambda reads: reads["enable_lora_overlap_loading"], "asynchronous loading of LoRA adapters"),
    (lambda reads: reads["enable_hisparse"], "HiSparse"),
    (lambda reads: reads["enable_hierarchical_cache"], "the hierarchical cache"),
    (lambda reads: reads["enable_lmcache"], "LMCache"),
    (lambda reads: reads["enable_unified_cache_external_linker"], "an external cache linker"),
    (lambda reads: reads["enable_unified_memory"], "unified memory pools"),
    (lambda reads: reads["use_ngram_embedding"], "n-gram embeddings"),
    (lambda reads: reads["prefill_delayer"] is not None, "the prefill delayer"),
    (lambda reads: reads["kv_shard_widening"] > 1, "pages interleaved among ranks"),
    (
        lambda reads: reads["is_hybrid_swa"] and _lets_go_of_windows(),
        "SGLANG_OPT_RELEASE_PREFILL_SWA, where there are sliding windows",
    ),
)

_ARGUMENTS: Cases = (
    (lambda reads: reads["pp_size"] > 1, "pipeline parallelism"),
    (lambda reads: (reads["dcp_size"] or 1) > 1, "decode context parallelism"),
    (lambda reads: reads["kv_canary"] != "none", "the KV canary"),
    (lambda reads: reads["enable_pd_role_switch"], "roles that change at runtime"),
    (lambda reads: reads["enable_watermark"], "watermarks"),
)

_MODELS: Cases = (
    (lambda reads: reads["is_encoder_decoder"], "encoder and decoder"),
    (lambda reads: reads["use_engram"], "engrams"),
)

_REQUESTS: Cases = (
    (lambda reads: reads["beam_group"] is not None, "a beam group"),
    (lambda reads: reads["input_embeds"] is not None, "input given as embeddings"),
    (lambda reads: reads["positional_embed_overrides"] is not None, "embeddings overridden"),
    (lambda reads: reads["session"] is not None, "a session"),
    (lambda reads: bool(reads["return_routed_experts"]), "routed experts to be returned"),
    (lambda reads: bool(reads["return_indexer_topk"]), "the indexer's choice to be returned"),
    (lambda reads: reads["inflight_middle_chunks"] > 0, "prefill under way"),
    (lambda reads: len(reads["output_ids"]) == 0, "no token yet"),
)


def _lets_go_of_windows() -> bool:
    """Whether a running request may lose slots in its windows on which kvtide relies."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_OPT_RELEASE_PREFILL_SWA.get())


def refuse_server(scheduler: Any) -> None:
    """Raises Refused, with the reason, for a server whose requests can't resume from saved KV."""
    _read_all(scheduler)
    reads = Reader(scheduler, READS)
    reasons = [
        *_holding(reads, _SERVERS),
        *_holding(Reader(reads["server_args"], READS), _ARGUMENTS),
        *_holding(Reader(reads["model_config"], READS), _MODELS),
    ]
    kinds = {owner: name_of(reads[owner]) for owner in _KNOWN}
    reasons += [
        f"{kind}, which isn't known" for owner, kind in kinds.items() if kind not in _KNOWN[owner]
    ]
    if reasons:
        raise Refused(f"colocated serving isn't covered with {', '.join(reasons)}")


def _read_all(scheduler: Any) -> None:
    """Raises Refused if an attribute is missing that is read later, when requests come back."""
    for table in (resume.READS, allocation.READS, unseen_results.READS):
        owners = [scheduler, scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool]
        for owner in [*owners, scheduler.tree_cache, *_adapters(scheduler)]:
            reads = Reader(owner, table)
            for kind in type(owner).__mro__:
                for entry in table.get(kind.__name__, ()):
                    reads[entry.removesuffix("?")]


def _adapters(scheduler: Any) -> list[Any]:
    """The objects on the path from a scheduler to its LoRA adapters; none without adapters."""
    owner, owners = scheduler, []
    for name in ("tp_worker", "model_runner", "lora_manager") if scheduler.enable_lora else ():
        owner = Reader(owner, resume.READS)[name]
        owners.append(owner)
    return owners


def _holding(reads: Reader, cases: Cases) -> list[str]:
    return [reason for holds, reason in cases if holds(reads)]


def why_not(req: Any) -> str | None:
    """Why this request can't resume from saved KV; None if it can."""
    return next(iter(_holding(Reader(req, READS), _REQUESTS)), None)


def reasons() -> tuple[list[str], list[str]]:
    """All reasons for servers, and all for requests; the documentation lists them."""
    servers = (*_SERVERS, *_ARGUMENTS, *_MODELS)
    return [reason for _, reason in servers], [reason for _, reason in _REQUESTS]
