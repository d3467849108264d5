"""A small model of any of transformers' causal architectures, with weights that show attention.

Configurations have different names for their sizes. A size that isn't named here stays as its type
has it, and a model that would be too large because of it is never built.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types of `AutoModelForCausalLM` in the installed transformers."""
VOCABULARY = 260
_LARGEST_PARAMETERS = 50_000_000
_LAYERS = 4
_HEADS = 4

_BY_SIZE: dict[int, str] = {
    _LAYERS: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_encoder_layers num_decoder_layers num_blocks num_attention_heads n_head n_heads "
        "num_heads decoder_attention_heads encoder_attention_heads num_encoder_attention_heads "
        "num_decoder_attention_heads attention_heads swa_num_attention_heads num_kv_heads "
        "index_n_heads"
    ),
    64: (
        "hidden_size d_model n_embd embedding_size emb_dim embedding_dim word_embed_proj_dim "
        "attention_hidden_size lru_width cross_attention_hidden_size input_embedding_size "
        "output_embedding_size"
    ),
    96: (
        "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff "
        "ffn_hidden_size feed_forward_size intermediate_size_mlp shared_intermediate_size "
        "d_inner prefix_dense_intermediate_size dense_intermediate_size"
    ),
    32: (
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size moe_latent_size "
        "kv_lora_rank q_lora_rank"
    ),
    16: (
        "head_dim kv_channels attention_head_size d_head dim_head swa_head_dim v_head_dim "
        "qk_nope_head_dim attention_head_dim mamba_d_head mamba_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_state ssm_state_size state_size "
        "sliding_window sliding_window_size window_size hidden_size_per_layer_input "
        "index_head_dim"
    ),
    8: (
        "rotary_dim qk_rope_head_dim num_experts n_routed_experts num_local_experts "
        "moe_num_experts linear_num_key_heads linear_num_value_heads mamba_n_heads "
        "mamba_num_heads linear_num_heads index_topk"
    ),
    2: (
        "num_key_value_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k "
        "top_k_experts eos_token_id"
    ),
    1: (
        "n_group topk_group mamba_n_groups n_groups mamba_ngroups n_shared_experts "
        "num_shared_experts first_k_dense_replace bos_token_id decoder_start_token_id"
    ),
    0: "pad_token_id",
    512: (
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"
    ),
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
}
_SIZES: dict[str, Any] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
# If it is tied to the embeddings, a model mostly repeats its input, whatever it attends to.
_SIZES |= {"forced_eos_token_id": None, "tie_word_embeddings": False}

# Fields that these sizes would contradict, or that a type needs besides.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "granitemoehybrid": {"layer_types": ["mamba", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


class NotSmallError(Exception):
    """The architecture can't be made small by the sizes that are known here."""


def small_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Makes a model in float32 with random weights, which are the same each time.

    `changes` are fields of its text configuration; fields that it doesn't have are left out. Raises
    NotSmallError if the model would be large, and transformers' error if it can't be built.
    """
    config = _small_config(CONFIG_MAPPING[model_type], model_type, changes)
    with torch.device("meta"):
        count = sum(
            weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
    if count > _LARGEST_PARAMETERS:
        raise NotSmallError(f"it comes out at {count:,} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _make_lively(model)
    return model.eval()


def without_windows(model_type: str) -> dict[str, Any]:
    """Returns changes that make all layers attend in full; some types need other fields for it."""
    if model_type in ("cwm", "exaone4", "gpt_oss", "gemma2", "gemma3_text", "cohere2", "olmo3"):
        return {"sliding_window": 512, "layer_types": ["full_attention"] * _LAYERS}
    return {"sliding_window": None, "layer_types": ["full_attention"] * _LAYERS}


def _small_config(kind: Any, model_type: str, changes: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # all heads share a latent, so there are no fewer key heads
        sizes["num_key_value_heads"] = _HEADS
    sizes |= _OWN.get(model_type, {})
    sizes |= {name: value for name, value in changes.items() if name in names}
    for name in getattr(kind, "sub_configs", {}):
        part = type(getattr(kind(), name, None))
        if dataclasses.is_dataclass(part):
            sizes[name] = _small_config(part, part.model_type, changes).to_dict()
    return kind(**sizes)


@torch.no_grad()
def _make_lively(model: PreTrainedModel) -> None:
    """Sets larger weights: with transformers' initialisation tokens hardly affect each other."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() >= 2 and "conv" not in name:
            width = min(weight.shape[-1], weight.shape[-2])
            weight.copy_(torch.randn(weight.shape, generator=generator) * 1.5 / width**0.5)
        elif name.endswith("bias"):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
