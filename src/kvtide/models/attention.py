"""Tells whether a model's attention does more than attend to all earlier tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtide.models.types import LINEAR, WINDOWED, Config, text_model_of

# These choose their frequencies by the longest position in the step, so by other requests.
_PER_STEP_ROPE = frozenset({"dynamic", "longrope"})


def special_attention(config: Config) -> str | None:
    """What is special about a model's attention, as half a sentence; None for plain attention.

    A model's attention is plain if each layer caches keys and values and attends to those of all
    earlier tokens. Raises UsageError for a model type or a field that kvtide doesn't know.
    """
    if config.get("is_causal") is False:
        return "its attention isn't causal"
    if _has_distance_bias(config):
        return "it biases attention by distance (ALiBi)"
    model = text_model_of(config)
    if model.kind == "mla":
        return f"it caches latents (MLA, kv_lora_rank={model.field('kv_lora_rank')})"
    if WINDOWED in model.layers:
        window, limit = model.field("sliding_window"), model.field("max_position_embeddings")
        return f"it has a sliding window ({window} of {limit} positions)"
    if LINEAR in model.layers:
        return f"it has layers of type {LINEAR}"
    rope_type = _per_step_rope(config.get("rope_parameters"))
    if rope_type is not None:
        return f"its positions are scaled by the longest request in the step ({rope_type} RoPE)"
    return None


def _has_distance_bias(config: Config) -> bool:
    settings = config.get("attn_config")
    nested = settings.get("alibi") if isinstance(settings, Mapping) else None
    return "bloom" in str(config.get("model_type")) or bool(config.get("alibi") or nested)


def _per_step_rope(rope: Any) -> str | None:
    """The RoPE type that depends on the other requests, or None.

    A configuration gives the parameters once, or for each type of layer.
    """
    if not isinstance(rope, Mapping):
        return None
    sets = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    types = [parameters.get("rope_type") for parameters in sets]
    return next((name for name in types if name in _PER_STEP_ROPE), None)
