"""Brings a retracted request back into the running batch, in SGLang's terms.

This is all that SGLang does for a request between its waiting queue and its next decode step,
except the forward pass: admission, slots (`allocation`), the prefix cache, a batch with its
sampling state. A request that comes back has slots for all its tokens. Then the prefix cache shares
the slots of tokens that it already holds.

Layers with a sliding window have slots for a request's last tokens only, and recurrent layers have
a state for all tokens. Both come back unchanged, and enter the prefix cache only at the end.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtide.plugin.reader import Table
from kvtide.plugin.sglang.ordinary.allocation import longest_window_slots

READS: Table = {
    "Scheduler": (
        *("token_to_kv_pool_allocator", "req_to_token_pool", "tree_cache", "model_config"),
        *("waiting_queue", "chunked_req?", "last_batch?", "policy", "enable_priority_scheduling"),
        *("enable_overlap", "spec_algorithm", "future_map", "page_size", "max_prefill_tokens"),
        *("max_running_requests", "new_token_ratio_tracker", "get_prefill_adder_class"),
        *("get_num_allocatable_reqs", "weight_updater", "grammar_manager"),
        *("sliding_window_size?", "is_hybrid_swa", "is_hybrid_ssm", "enable_lora?", "tp_worker"),
    ),
    "TpModelWorker": ("model_runner",),
    "ModelRunner": ("lora_manager",),
    "LoRAManager": ("validate_lora_batch",),
    "Req": (
        *("rid", "seqlen", "origin_input_ids", "output_ids", "priority", "extra_key", "kv"),
        *("lock", "last_node", "last_host_node", "best_match_node", "prefix_len", "extend_end"),
        *("num_matched_prefix_tokens", "host_hit_length", "swa_host_hit_length"),
        *("mamba_host_hit_length", "swa_branching_seqlen", "refresh_fill_ids", "time_stats"),
        *("lora_id", "finished"),
    ),
    "ReqKvInfo": (
        *("req_pool_idx", "cache_protected_len", "cache_inserted_len"),
        *("kv_committed_len", "kv_allocated_len"),
    ),
    "ScheduleBatch": (
        *("init_new", "prepare_for_prebuilt", "merge_batch", "is_empty", "reqs", "input_ids"),
        *("req_pool_indices", "sampling_info", "device", "tree_cache"),
    ),
    "BatchedPenalizerOrchestrator": ("is_required", "cumulate_output_tokens"),
    "SchedulePolicy": ("priority_sign",),
    "PrefillAdder": ("add_one_req", "can_run_list"),
    "SchedulerWeightUpdaterManager": ("scheduler",),
}
"""A request's return needs these attributes, in `shelf` too; they are checked at the start."""


def bind_to_root(scheduler: Any, req: Any) -> None:
    """Makes the request a request without a cached prefix."""
    root = scheduler.tree_cache.root_node_handle(req.extra_key)
    req.last_node = req.last_host_node = req.best_match_node = root
    req.lock = None
    req.prefix_len = req.num_matched_prefix_tokens = 0
    req.host_hit_length = req.swa_host_hit_length = req.mamba_host_hit_length = 0
    req.swa_branching_seqlen = None
    req.kv.cache_protected_len = req.kv.cache_inserted_len = 0
    req.refresh_fill_ids()


def has_adapter(scheduler: Any, req: Any, running: Any) -> bool:
    """Whether the request's LoRA adapter fits beside the adapters of the running batch.

    SGLang's rule decides, which counts "no adapter" as an adapter; it loads adapters before each
    step. SGLang may also drain an adapter by admitting no new requests for it. A request that comes
    back isn't new, and SGLang ignores its drains while all other requests wait.
    """
    if not scheduler.enable_lora:
        return True
    adapters = {other.lora_id for other in running.reqs if not other.finished()}
    if req.lora_id in adapters:
        return True
    manager = scheduler.tp_worker.model_runner.lora_manager
    return bool(manager.validate_lora_batch({*adapters, req.lora_id}))


def has_room(scheduler: Any, req: Any, running: Any) -> bool:
    """Whether SGLang would admit the request now if it computed the whole request again.

    SGLang's rule decides, so that a request isn't retracted again right after its return.
    """
    # With chunks of a window's length a new request needs as many slots as one that comes back.
    chunk = longest_window_slots(scheduler) if scheduler.is_hybrid_swa else None
    adder = scheduler.get_prefill_adder_class()(
        scheduler.page_size,
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
        running,
        scheduler.new_token_ratio_tracker.current,
        scheduler.max_prefill_tokens,
        chunk,
        max_running_requests=scheduler.max_running_requests,
    )
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    scheduler.tree_cache.unlock(req.lock)
    req.lock = req.extend_end = None
    return any(admitted is req for admitted in adder.can_run_list)


def batch_of(scheduler: Any, req: Any) -> Any:
    """A batch of this request, whose KV is in its slots, to merge into the running batch."""
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.common import checkpoint_kv_cache

    batch = ScheduleBatch.init_new(
        [req],
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    # The next step reads its input there, as if the previous step had just sampled it.
    last = torch.tensor([req.output_ids[-1]], dtype=torch.int64, device=batch.device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last))
    batch.input_ids = None
    if scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm:
        req.prefix_len = req.extend_end
    else:
        checkpoint_kv_cache(req, scheduler.tree_cache)
    req.time_stats.set_forward_entry_time()
    return batch


def recount_penalties(batch: Any, req: Any, *, is_late: bool) -> bool:
    """Tells a batch's penalties the tokens of its only request. False if it has no penalties.

    SGLang counts an answer's tokens while it decodes, and the last token only at the next step.
    With overlapped scheduling (`is_late`) it counts a step later, and counts the prompt's last
    token in the first step.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    if not penalties.is_required:
        return False
    counted = [*([req.origin_input_ids[-1]] if is_late else []), *req.output_ids]
    for token in counted[: len(req.output_ids) - 1]:
        penalties.cumulate_output_tokens(
            torch.tensor([token], dtype=torch.int64, device=batch.device)
        )
    return True
