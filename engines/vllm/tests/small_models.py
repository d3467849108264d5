"""Tiny models with random weights, of families whose layers keep KV in several groups, or latent.

Their answers prove nothing, since random weights find all tokens about equally likely. Bytes do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

HAS_FP8 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether vLLM keeps KV in fp8 on this CPU. Otherwise its tests have the model's dtype."""
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

PLAIN = {
    **_SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
}
"""Full attention alone, with heads for two ranks."""

WINDOWS = {
    **_SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "sliding_window": 256,
    "query_pre_attn_scalar": 32,
}
"""Sliding windows beside full attention: three groups, whose layers lie in the same memory."""

RECURRENT = {
    **_SIZES,
    **_EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}
"""Recurrent state beside full attention: four groups, whose pages are padded to one size."""

LATENT = {
    **_SIZES,
    **_EXPERTS,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Latent attention: one row a token, for all heads together."""


def folder_of(config: dict[str, Any], parent: Path) -> str:
    """A folder with the configuration, which vLLM reads as a model with `load_format="dummy"`."""
    folder = parent / str(config["model_type"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
