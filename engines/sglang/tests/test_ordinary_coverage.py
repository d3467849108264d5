"""An ordinary server with kvtide leaves some requests and servers to SGLang, with reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ordinary_fakes import Req, Scheduler, shelved

from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.ordinary.coverage import refuse_server, why_not

KINDS: dict[str, dict[str, Any]] = {
    "a beam group": {"beam_group": object()},
    "input given as embeddings": {"input_embeds": [[0.5]]},
    "embeddings overridden": {"positional_embed_overrides": object()},
    "a session": {"session": object()},
    "routed experts to be returned": {"return_routed_experts": True},
    "the indexer's choice to be returned": {"return_indexer_topk": True},
    "prefill under way": {"inflight_middle_chunks": 1},
    "no token yet": {"output_ids": []},
}


@pytest.mark.parametrize("reason", KINDS)
def test_requests_of_some_kinds_arent_saved(reason: str) -> None:
    """Each kind has its reason and is counted; SGLang computes such requests again."""
    shelf, keeper = shelved(Scheduler())
    shelf.keep(Req("special", **KINDS[reason]))
    assert (reason, ["decline"]) == (why_not(Req("special", **KINDS[reason])), keeper.calls)
    assert why_not(Req("ordinary")) is None


class TokenToKVPoolAllocator:
    """A class with the name of SGLang's."""

    __module__ = "sglang.srt.mem_cache.allocator.token"


class ReqToTokenPool:
    """A class with the name of SGLang's, and with the methods that are looked for."""

    __module__ = "sglang.srt.mem_cache.memory_pool"
    available_size = alloc = write = alloc_aux_to_lengths = print


class RadixCache:
    """A class with the name of SGLang's."""

    __module__ = "sglang.srt.mem_cache.radix_cache"


class ServerArgs(SimpleNamespace):
    """A class with the name of SGLang's."""


class ModelConfig(SimpleNamespace):
    """A class with the name of SGLang's."""


FLAGS = (
    *("enable_pdmux", "enable_overlap_mlx", "require_mlp_sync", "enable_hisparse"),
    "enable_lora_overlap_loading",
    *("enable_hierarchical_cache", "enable_lmcache", "enable_unified_cache_external_linker"),
    *("enable_unified_memory", "use_ngram_embedding"),
)
LATER = (
    *("future_map", "page_size", "max_prefill_tokens", "weight_updater"),
    *("max_running_requests", "new_token_ratio_tracker", "get_prefill_adder_class"),
    *("grammar_manager", "process_batch_result"),
)
ARGUMENTS = ("enable_pd_role_switch", "enable_watermark")
MODELS = ("is_encoder_decoder", "use_engram")


def server(**changed: Any) -> Scheduler:
    """Makes an ordinary scheduler with changes."""
    arguments = {
        "pp_size": 1,
        "dcp_size": 1,
        "kv_canary": "none",
        **dict.fromkeys(ARGUMENTS, False),
    }
    model = dict.fromkeys(MODELS, False)
    ordinary = {
        **dict.fromkeys(FLAGS, False),
        "disaggregation_mode": SimpleNamespace(value="null"),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "dllm_config": None,
        "prefill_delayer": None,
        "kv_shard_widening": 1,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "tp_worker": object(),
        **dict.fromkeys(LATER, object()),
        "token_to_kv_pool_allocator": TokenToKVPoolAllocator(),
        "req_to_token_pool": ReqToTokenPool(),
        "tree_cache": RadixCache(),
        "server_args": ServerArgs(**{key: changed.pop(key, arguments[key]) for key in arguments}),
        "model_config": ModelConfig(**{key: changed.pop(key, model[key]) for key in model}),
    }
    return Scheduler(**{**ordinary, **changed})


SPECIAL: list[dict[str, Any]] = [
    *({flag: True} for flag in (*FLAGS, *ARGUMENTS, *MODELS)),
    {"pp_size": 2},
    {"dcp_size": 2},
    {"kv_canary": "log"},
    {"kv_shard_widening": 2},
    {"dllm_config": object()},
    {"prefill_delayer": object()},
    {"disaggregation_mode": SimpleNamespace(value="prefill")},
    {"spec_algorithm": SimpleNamespace(is_none=lambda: False)},
    {"tree_cache": object()},
    {"req_to_token_pool": object()},
    {"token_to_kv_pool_allocator": object()},
]


@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: next(iter(special)))
def test_servers_of_some_kinds_arent_covered(special: dict[str, Any]) -> None:
    """They are refused when they start; an ordinary server isn't."""
    refuse_server(server())
    with pytest.raises(Refused, match="colocated serving isn't covered with "):
        refuse_server(server(**special))


@pytest.mark.parametrize("owner", ["token_to_kv_pool_allocator", "req_to_token_pool", "tree_cache"])
def test_a_server_with_a_class_of_another_package_is_refused(owner: str) -> None:
    """Such a class may give a request more than kvtide knows, though it has the same name."""
    ordinary = server()
    kind = type(getattr(ordinary, owner))
    setattr(ordinary, owner, type(kind.__name__, (kind,), {"__module__": "vendor.pools"})())
    with pytest.raises(Refused, match=rf"vendor\.pools\.{kind.__name__}, which isn't known"):
        refuse_server(ordinary)


def test_attributes_are_looked_for_at_the_start() -> None:
    """A missing attribute must not be found only in the middle of a retraction."""
    with pytest.raises(Refused, match="Scheduler has no 'future_map'"):
        refuse_server(server(future_map=None))


class TpModelWorker(SimpleNamespace):
    """A class with the name of SGLang's."""


class ModelRunner(SimpleNamespace):
    """A class with the name of SGLang's."""


class LoRAManager(SimpleNamespace):
    """A class with the name of SGLang's."""


def test_a_server_with_adapters_is_covered_if_it_can_count_their_places() -> None:
    """Its requests are covered, too. A server without adapters isn't asked."""
    manager = LoRAManager(validate_lora_batch=print)
    worker = TpModelWorker(model_runner=ModelRunner(lora_manager=manager))
    refuse_server(server(enable_lora=True, tp_worker=worker))
    assert why_not(Req("adapted", lora_id="left")) is None
    del manager.validate_lora_batch
    with pytest.raises(Refused, match="LoRAManager has no 'validate_lora_batch'"):
        refuse_server(server(enable_lora=True, tp_worker=worker))
    refuse_server(server(tp_worker=worker))
