"""Which configurations are served; all others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf

from kvtide.errors import UsageError
from kvtide.serve.supported import geometry_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}


def test_geometry_has_the_models_sizes() -> None:
    """Each layer has two planes of head x head_dim, with the requested page size."""
    config = tf.LlamaConfig(**{**SMALL, "head_dim": 24})
    geometry = geometry_of(config, "bfloat16", 8)
    sizes = {"layer": 2, "head": 2, "head_dim": 24, "v_head_dim": 24}
    assert (sizes, 8) == (dict(geometry.sizes), geometry.page_size)
    assert {"bfloat16"} == {plane.dtype for plane in geometry.planes}


@pytest.mark.parametrize(
    "config",
    [
        tf.LlamaConfig(**SMALL),
        tf.Qwen2Config(**SMALL, sliding_window=64, use_sliding_window=False),
        tf.Qwen3Config(**SMALL),
        tf.MistralConfig(**SMALL, sliding_window=None),
        tf.MistralConfig(**SMALL, sliding_window=256),
    ],
    ids=lambda config: f"{config.model_type}-{getattr(config, 'sliding_window', None)}",
)
def test_full_attention_decoders_are_served(config: Any) -> None:
    """Grouped and full heads are served, and so is a window longer than the context."""
    geometry_of(config, "float32", 16)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.MistralConfig(**SMALL, sliding_window=64), "sliding window (64 of 256 positions)"),
        (
            tf.Qwen2Config(
                **SMALL,
                sliding_window=64,
                use_sliding_window=True,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "sliding window",
        ),
        (tf.DeepseekV3Config(num_hidden_layers=2), "kv_lora_rank=512"),
        (tf.Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (tf.T5Config(), "encoder"),
        (tf.FalconConfig(alibi=True, num_hidden_layers=2), "ALiBi"),
        (tf.LlamaConfig(**SMALL, rope_parameters=LONG_ROPE), "longrope"),
        (tf.LlamaConfig(**SMALL, is_causal=False), "isn't causal"),
        (tf.MambaConfig(), "it is unknown, and its cache isn't guessed"),
        (
            tf.Gemma4UnifiedTextConfig(use_bidirectional_attention=None),
            "its sizes differ from layer to layer",
        ),
        (
            tf.Gemma4TextConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2),
            "its sizes differ from layer to layer",
        ),
        (tf.BertConfig(), "isn't causal (is_decoder is false)"),
        (tf.MptConfig(), "ALiBi"),
        (tf.BloomConfig(), "ALiBi"),
        (
            tf.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "(its layers are conv, full_attention)",
        ),
        (tf.MiniCPM3Config(), "(kv_lora_rank is 256)"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_other_attention_is_refused_by_name(config: Any, reason: str) -> None:
    """The error names the model type and the part that isn't served."""
    with pytest.raises(UsageError, match="isn't served") as caught:
        geometry_of(config, "float32", 16)
    assert reason in str(caught.value)
    assert repr(config.model_type) in str(caught.value) or config.model_type in str(caught.value)


def test_dynamic_positions_are_found_in_each_layer_type() -> None:
    """A configuration may give the parameters of positions once or for each type of layer."""
    config = tf.LlamaConfig(**SMALL)
    config.rope_parameters = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(UsageError, match="dynamic RoPE"):
        geometry_of(config, "float32", 16)
