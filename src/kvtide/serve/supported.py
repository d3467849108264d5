"""Which models the engine serves: decoders whose every layer attends to all earlier tokens.

What a model caches is read from its configuration by the same table as `kvtide plan` reads it
(`kvtide.models.types`); what isn't known there isn't served either. Anything but keys and
values in full is refused at the start, with the reason. What a configuration doesn't show, such as
an argument that changes the attention, is found by the adapter's trial pass and by
`kvtide.serve.owncheck`, also before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtide.errors import UsageError
from kvtide.layout import Geometry
from kvtide.models.cache import cache_of
from kvtide.models.types import LINEAR, WINDOWED, describe

# These choose their frequencies by the longest position in the step, so by the neighbours.
_PER_STEP_ROPE = frozenset({"dynamic", "longrope"})


def geometry_of(config: Any, dtype_name: str, page_size: int) -> Geometry:
    """The KV geometry of a transformers configuration, for pools of ``dtype_name``.

    ``page_size`` is in tokens. Raises UsageError, with the reason, for a model that the engine
    doesn't serve.
    """
    text = config.get_text_config(decoder=True).to_dict()
    name = text.get("model_type")
    try:
        reason = _reason_to_refuse(text)
        if reason is None:
            return cache_of(text, dtype=dtype_name, page_size=page_size).geometry
    except UsageError as error:
        reason = str(error).removeprefix(f"model type {name!r}: ")
    raise UsageError(
        f"model type {name!r} isn't served: {reason}; choose a decoder with full attention in "
        "every layer, such as Llama, Qwen or SmolLM2"
    )


def _reason_to_refuse(text: Mapping[str, Any]) -> str | None:
    """Raises UsageError for what the table of model types doesn't know."""
    if text.get("is_causal") is False:
        return "its attention isn't causal"
    own = text.get("attn_config")
    attention = own if isinstance(own, Mapping) else {}
    if "bloom" in str(text.get("model_type")) or text.get("alibi") or attention.get("alibi"):
        return "it biases attention by distance (ALiBi)"
    model = describe(text)
    if model.kind == "mla":
        return f"it caches latents (MLA, kv_lora_rank={model.field('kv_lora_rank')})"
    if WINDOWED in model.layers:
        window, limit = model.field("sliding_window"), model.field("max_position_embeddings")
        return f"it has a sliding window ({window} of {limit} positions)"
    if LINEAR in model.layers:
        return f"it has layers of type {LINEAR}"
    return _rope_reason(text.get("rope_parameters"))


def _rope_reason(rope: Any) -> str | None:
    if not isinstance(rope, Mapping):
        return None
    # One set of parameters, or one for each type of layer.
    sets = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    for rope_type in [parameters.get("rope_type") for parameters in sets]:
        if rope_type in _PER_STEP_ROPE:
            return f"its positions are scaled by the longest request in the step ({rope_type} RoPE)"
    return None
