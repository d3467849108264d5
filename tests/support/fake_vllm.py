"""vLLM's configuration, as kvtide reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Fields:
    """An object with the fields that it is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class VllmConfig(Fields): ...


class ModelConfig(Fields): ...


class CacheConfig(Fields): ...


class ParallelConfig(Fields): ...


class LoadConfig(Fields): ...


class CompilationConfig(Fields): ...


_MODEL = (
    *("model", "hf_config", "model_impl", "trust_remote_code", "dtype", "quantization", "seed"),
    *("max_model_len", "revision", "code_revision", "hf_token", "multimodal_config"),
    *("quantization_config", "a_new_model_option"),
)
_CACHE = (
    *("cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    *("prefix_caching_hash_algo", "kv_cache_layout", "num_gpu_blocks", "_private", "a_new_option"),
)


def config_for(model: Path, **changed: Any) -> VllmConfig:
    """vLLM's configuration for a model in a folder; `changed` are fields of any part."""
    hf_config = {"layers": changed.pop("layers", 2), "_name_or_path": str(model)}
    auto_map = changed.pop("auto_map", None)
    values = {
        "model": str(model),
        "hf_config": SimpleNamespace(
            to_json_string=lambda use_diff: json.dumps(hf_config), auto_map=auto_map
        ),
        "model_impl": "auto",
        "trust_remote_code": False,
        "dtype": torch.bfloat16,
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [],
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "cp_kv_cache_interleave_size": 1,
        "prefix_caching_hash_algo": "sha256",
        "kv_cache_layout": "LBHNC",
        "num_gpu_blocks": 100,
        "_private": False,
        "a_new_option": None,
        "rank": 0,
        "world_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_index": 0,
        "load_format": "auto",
        "model_loader_extra_config": {},
        "static_forward_context": {},
        **changed,
    }
    parts = {
        "model_config": ModelConfig(**{name: values.get(name) for name in _MODEL}),
        "cache_config": CacheConfig(**{name: values[name] for name in _CACHE}),
        "parallel_config": ParallelConfig(**values),
        "load_config": LoadConfig(**values),
        "compilation_config": CompilationConfig(**values),
        "lora_config": values.get("lora_config"),
    }
    return VllmConfig(**parts)
