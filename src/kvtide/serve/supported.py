"""Which models the engine serves: decoders whose every layer attends to all earlier tokens.

Anything else is refused at the start, by what its configuration declares, with the reason. What
a configuration doesn't show, such as an argument that changes the attention, is found by the
adapter's trial pass, also before the first request.
"""

from __future__ import annotations

from typing import Any

from kvtide.errors import UsageError
from kvtide.layout import GQA, Geometry

# These choose their frequencies by the longest position in the step, so by the neighbours.
_PER_STEP_ROPE = frozenset({"dynamic", "longrope"})


def geometry_of(config: Any, dtype_name: str, page_size: int) -> Geometry:
    """The KV geometry of a transformers configuration, for pools of ``dtype_name``.

    ``page_size`` is in tokens. Raises UsageError, with the reason, for a model that the engine
    doesn't serve.
    """
    text = config.get_text_config(decoder=True)
    _refuse_unsupported(text)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return GQA.bind(
        dtype=dtype_name,
        layer=text.num_hidden_layers,
        token=page_size,
        head=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
    )


def _refuse_unsupported(text: Any) -> None:
    reason = _reason_to_refuse(text)
    if reason is not None:
        raise UsageError(
            f"model type {getattr(text, 'model_type', '?')!r} isn't served: {reason}; choose a "
            "decoder with full attention in every layer, such as Llama, Qwen or SmolLM2"
        )


def _reason_to_refuse(text: Any) -> str | None:
    def of(name: str) -> Any:
        return getattr(text, name, None)

    if of("is_encoder_decoder") or of("add_cross_attention"):
        return "it attends across to an encoder"
    if of("is_causal") is False:
        return "its attention isn't causal"
    if of("kv_lora_rank") is not None:
        return f"it caches latents (MLA, kv_lora_rank={of('kv_lora_rank')})"
    if not isinstance(of("num_attention_heads"), int):
        return "it declares no number of attention heads that holds for all layers"
    if not isinstance(of("num_key_value_heads"), int | None):
        return "its number of key heads differs between layers"
    if of("alibi"):
        return "it biases attention by distance (ALiBi)"
    if of("attention_chunk_size") is not None:
        return f"its attention is chunked (attention_chunk_size={of('attention_chunk_size')})"
    return _window_reason(text) or _rope_reason(text)


def _window_reason(text: Any) -> str | None:
    window = getattr(text, "sliding_window", None)
    limit = getattr(text, "max_position_embeddings", None)
    types = getattr(text, "layer_types", None) or []
    foreign = sorted(set(types) - {"full_attention", "sliding_attention"})
    if foreign:
        return f"it has layers of type {', '.join(foreign)}"
    windowed = "sliding_attention" in types or not types
    if windowed and window is not None and (limit is None or window < limit):
        return f"it has a sliding window ({window} of {limit} positions)"
    return None


def _rope_reason(text: Any) -> str | None:
    rope = getattr(text, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    sets = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for rope_type in [parameters.get("rope_type") for parameters in sets]:
        if rope_type in _PER_STEP_ROPE:
            return f"its positions are scaled by the longest request in the step ({rope_type} RoPE)"
    return None
