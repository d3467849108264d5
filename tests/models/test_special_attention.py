from __future__ import annotations

from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.models.attention import special_attention

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 64}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "is_causal": True, "alibi": False, "rope_parameters": {"rope_type": "llama3"}},
        {**MISTRAL, "max_position_embeddings": 64},
    ],
)
def test_plain_attention_has_nothing_special(config: dict[str, Any]) -> None:
    """A window as long as the context changes nothing."""
    assert special_attention(config) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "is_causal": False}, "isn't causal"),
        ({**LLAMA, "alibi": True}, "ALiBi"),
        ({**LLAMA, "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latents (MLA, kv_lora_rank=512)"),
        ({**MISTRAL, "max_position_embeddings": 256}, "sliding window (64 of 256 positions)"),
        ({"model_type": "qwen3_next"}, "layers of type linear_attention"),
        ({**LLAMA, "rope_parameters": {"rope_type": "dynamic"}}, "dynamic RoPE"),
        ({**LLAMA, "rope_parameters": {"full": {"rope_type": "longrope"}}}, "longrope RoPE"),
    ],
)
def test_special_attention_is_named(config: dict[str, Any], reason: str) -> None:
    """The reason is half a sentence, which becomes a part of the engine's refusal."""
    assert reason in str(special_attention(config))


def test_an_unknown_type_is_refused() -> None:
    """kvtide doesn't guess the attention of a type that its table lacks."""
    with pytest.raises(UsageError, match="'perceiver': it is unknown"):
        special_attention({"model_type": "perceiver"})
