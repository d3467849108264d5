"""Which options of vLLM's decide a byte of a block beside its tokens: all but the ones named here.

So a new option counts at once. engines/vllm/tests/test_cache_options.py and test_model_options.py
ask somebody to decide about it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

CACHE_WITHOUT_EFFECT = {
    # how many blocks there are, and in which memory
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    *("kv_offloading_size", "kv_offloading_backend"),
    # which blocks are looked for and kept; a block's key has the tokens of each of its hashes
    *("enable_prefix_caching", "prefix_cache_retention_interval", "hash_block_size"),
    "cache_hit_alignment_tokens",
    # what others say, or who said it
    *("user_specified_block_size", "effective_attention_block_size", "is_attention_free"),
}
"""The options of vLLM's CacheConfig without effect on a block."""

MODEL_WITHOUT_EFFECT = {
    # where the model lies: its files, its configuration and its seed count by themselves
    *("model", "served_model_name", "revision", "code_revision", "hf_token", "seed"),
    *("hf_config", "hf_text_config", "hf_config_path", "hf_overrides", "config_format"),
    *("model_arch_config", "config_updated"),
    # how text becomes tokens, which are in a block's key; what a client may name
    *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
    *("allowed_local_media_path", "allowed_media_domains", "io_processor_plugin"),
    *("renderer_num_workers", "enable_prompt_embeds"),
    # how the next token is chosen, and what is told of it
    *("generation_config", "override_generation_config", "logits_processors", "logprobs_mode"),
    *("max_logprobs", "return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay"),
    # when memory is given back
    *("enable_sleep_mode", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
    *("sleep_preserve_parameter_names", "enable_cumem_allocator", "enable_nccl_comm_suspend"),
    # a draft has blocks of its own, which kvtide refuses
    *("spec_target_max_model_len", "is_submodel_config"),
    # its options count by themselves
    "multimodal_config",
}
"""The fields of vLLM's ModelConfig without effect on a block."""

MULTIMODAL_WITHOUT_EFFECT = {
    # what is kept of images that were processed, and how it goes from process to process
    *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
    *("mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
    # what a request may have
    *("limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings"),
    # what is tried at the start, and written
    *("skip_mm_profiling", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
}
"""The fields of vLLM's MultiModalConfig without effect on a block."""


def deciding(config: Any, without_effect: Collection[str]) -> str:
    """All options of a configuration but the ones without effect, as JSON."""
    found = {
        name: _stable(value)
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in without_effect
    }
    return json.dumps(found, sort_keys=True)


def _stable(value: Any) -> Any:
    """A value for JSON that another process gets, too, if it has equal options.

    What has no such text has another one in each process: nothing is found then, nothing wrong.
    """
    if isinstance(value, str | int | float | None):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return {each.name: _stable(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _stable(each) for name, each in value.items()}
    if isinstance(value, Set):
        return sorted(json.dumps(_stable(each), sort_keys=True) for each in value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_stable(each) for each in value]
    return str(value)
