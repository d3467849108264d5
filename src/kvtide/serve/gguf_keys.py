"""Compares the keys of a GGUF file with the configuration that transformers makes of them.

transformers reads some keys and silently ignores others. So each key must either agree with the
configuration or have no effect; otherwise the file is refused, and the error names the key. Scaled
positions and some widths, which transformers ignores, are copied to the configuration. llama.cpp
defines the format and the meaning of each key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvtide.errors import UsageError
from kvtide.serve.adapter_files import TEXT_SPLITS

Keys = Mapping[str, Any]
"""A file's keys and values. An array of texts is given by its length."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the factors that divide the frequencies of Llama 3.1 and later."""

# Keys about the file and about text, not about the model. With the last one a publisher of many
# files notes when and where each file was made.
_NO_PART_OF_THE_MODEL = ("general.", "tokenizer.", "quantize.", "imatrix.", "mradermacher.")
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEXT_SPLIT = "tokenizer.ggml.pre"
# transformers splits text like GPT-2 for every name that it doesn't know. For these that is right.
_AS_GPT_2 = {"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum"}
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_ROPE_SCALING = ("rope.scaling.", "rope.scale_linear")
# Meta uses these values for every model with such factors, and converters rely on them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _field(*names: str) -> Callable[[Any], Any]:
    """A function that reads the first of these attributes that a configuration has."""

    def read(config: Any) -> Any:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    return read


def _head_dim(config: Any) -> Any:
    return _field("head_dim")(config) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rotary_dim(config: Any) -> Any:
    share = _rope(config).get("partial_rotary_factor") or _field("partial_rotary_factor")(config)
    return int(_head_dim(config) * (1.0 if share is None else share))


_EPSILON = _field("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
# For each key, how to read the same value from the configuration; None if it has no such value.
_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "vocab_size": _field("vocab_size"),
    "context_length": _field("max_position_embeddings"),
    "embedding_length": _field("hidden_size"),
    "block_count": _field("num_hidden_layers"),
    "feed_forward_length": lambda config: (
        _field("intermediate_size", "n_inner")(config) or 4 * config.hidden_size
    ),
    "use_parallel_residual": _field("use_parallel_residual"),
    "attention.head_count": _field("num_attention_heads"),
    "attention.head_count_kv": _field("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_rms_epsilon": _field("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.scale": lambda config: (
        (_field("query_pre_attn_scalar")(config) or _head_dim(config)) ** -0.5
    ),
    "attention.sliding_window": _field("sliding_window"),
    "attn_logit_softcapping": _field("attn_logit_softcapping"),
    "final_logit_softcapping": _field("final_logit_softcapping"),
    "rope.dimension_count": _rotary_dim,
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "expert_count": _field("num_experts", "num_local_experts"),
    "expert_used_count": _field("num_experts_per_tok"),
    "expert_feed_forward_length": _field("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _field("shared_expert_intermediate_size"),
    "expert_weights_norm": _field("norm_topk_prob"),
}
# Widths that transformers doesn't read from the file; it assumes those of one model of each type.
_WIDTHS = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# For each key, the values that have no effect: no such part, no such limit, a factor of one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (False,),
    "expert_gating_func": (1,),  # softmax, which all served models use
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # transformers undoes this order of rows
}
# llama.cpp's value if a file has none of these keys; transformers may use another value. None means
# that llama.cpp requires the key.
_DEFAULTS: dict[tuple[str, ...], Callable[[Any], Any] | None] = {
    ("rope.freq_base",): lambda _: 10000.0,
    ("attention.scale",): lambda config: _head_dim(config) ** -0.5,
    ("attention.head_count",): None,
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"): None,
    ("expert_used_count",): None,
}


def complete(config: Any, keys: Keys, factors: Sequence[float] | None) -> None:
    """Copies to a configuration what transformers ignores: widths and scaled positions.

    Call this before the model is made. `factors` are the numbers of the tensor `ROPE_FACTORS`, if
    the file has it. Raises UsageError for a scaling that no configuration can state.
    """
    arch = _arch(keys)
    for name, attribute in _WIDTHS.items():
        width = keys.get(f"{arch}.{name}")
        if isinstance(width, int) and getattr(config, attribute, None) is not None:
            setattr(config, attribute, width)
    found = _scaling_of(keys, config)
    if factors is not None and any(factor != 1 for factor in factors):
        if found:
            raise _refuse(ROPE_FACTORS, len(factors), "factors, and scales its positions besides")
        found = _llama3(factors, config)
    if found and "rope_theta" not in _rope(config):
        raise _refuse(f"{arch}.rope.scaling", found, "and the model would run without it")
    if found:
        config.rope_parameters = {**_rope(config), **found}


def _scaling_of(keys: Keys, config: Any) -> dict[str, Any]:
    """The scaling of positions in a file's keys, as `rope_parameters`; empty if there is none."""
    arch = _arch(keys)
    scaling = {
        key.removeprefix(f"{arch}.rope.scaling."): value
        for key, value in keys.items()
        if key.startswith(f"{arch}.rope.scaling.")
    }
    factor = scaling.pop("factor", keys.get(f"{arch}.rope.scale_linear"))
    is_number = isinstance(factor, int | float)
    if factor is not None and not (is_number and 0 <= factor < math.inf):
        raise _refuse(f"{arch}.rope.scaling.factor", factor, "which is no factor")
    kind = scaling.pop("type", None if factor in (None, 0) else "linear")
    scaling.pop("finetuned", None)  # whether the model was trained with the scaling
    original = scaling.pop("original_context_length", None)
    if kind == "yarn" and factor:
        return _yarn(arch, scaling, float(factor), original or config.max_position_embeddings)
    _check_unscaled(arch, scaling)
    if kind in (None, "none"):
        return {}
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": float(factor)}
    raise _refuse(f"{arch}.rope.scaling.type", kind, f"with a factor of {factor}")


def check_keys(keys: Keys, config: Any) -> None:
    """Raises UsageError, with the key's name, for a key that the model would ignore."""
    arch = _arch(keys)
    kind = keys.get("general.type", "model")
    if kind != "model":
        raise UsageError(f"the file is no model: general.type is {kind!r}")
    parts = keys.get("split.count", 1)
    if parts > 1:
        raise UsageError(
            f"the file is one of {parts} parts: put them together with llama-gguf-split --merge"
        )
    values = {}
    for key, value in _model_keys(keys).items():
        if not key.startswith(f"{arch}."):
            raise _refuse(key, value, "and the model would run without it")
        values[key.removeprefix(f"{arch}.")] = value
    if values.get("attention.scale") == 0:
        del values["attention.scale"]  # 0 means that the file states none
    for name, value in values.items():
        if not name.startswith(_ROPE_SCALING):
            _check_key(arch, name, value, config)
    for names, default in _DEFAULTS.items():
        known = (_MEANINGS[name](config) for name in names)
        meant = next((value for value in known if value is not None), None)
        told = meant is None or not values.keys().isdisjoint(names)
        if not told and not (default and _same(default(config), meant)):
            raise UsageError(
                f"the file doesn't say {arch}.{' or '.join(names)}, and the model would run "
                f"with {meant}"
            )


def has_digits_apart(keys: Keys) -> bool:
    """Whether each digit of a text is a word. Apart from that, text is split as for GPT-2.

    Raises UsageError if the file splits text by an unknown rule: the model would read other tokens
    than it was trained with.
    """
    split = keys.get(_TEXT_SPLIT, "default")
    if keys.get("tokenizer.ggml.model") != "gpt2" or split in TEXT_SPLITS | _AS_GPT_2:
        return False
    if split not in _DIGITS_APART:
        raise _refuse(_TEXT_SPLIT, split, "and texts would be split into words as for GPT-2")
    return True


def has_no_space_before(keys: Keys) -> bool:
    """Whether no space is added before a text; SentencePiece adds one by default."""
    is_sentencepiece = keys.get("tokenizer.ggml.model") == "llama"
    return is_sentencepiece and keys.get("tokenizer.ggml.add_space_prefix") is False


def ends_of(keys: Keys) -> list[int]:
    """The tokens that end an answer: the end of a text, of a turn, of a message to a tool."""
    told = [keys.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return sorted({token for token in told if isinstance(token, int)})


def _check_key(arch: str, name: str, value: Any, config: Any) -> None:
    meant = _MEANINGS[name](config) if name in _MEANINGS else None
    if meant is not None and _same(value, meant):
        return
    if _is_neutral(name, value) and (meant is None or _is_neutral(name, meant)):
        return
    is_window = name == "attention.sliding_window" and isinstance(value, int)
    if is_window and not meant and value >= config.max_position_embeddings:
        return  # no context is longer than this window
    used = "without it" if meant is None else f"with {meant}"
    raise _refuse(f"{arch}.{name}", value, f"and the model would run {used}")


def _is_neutral(name: str, value: Any) -> bool:
    return any(_same(value, neutral) for neutral in _NEUTRAL.get(name, ()))


def _model_keys(keys: Keys) -> dict[str, Any]:
    skipped = (*_NO_PART_OF_THE_MODEL, "split.")
    return {key: value for key, value in keys.items() if not key.startswith(skipped)}


def _yarn(arch: str, scaling: dict[str, Any], factor: float, original: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
    }
    for name in ("beta_fast", "beta_slow"):
        if (value := scaling.pop(f"yarn_{name}", None)) is not None:
            found[name] = float(value)
    neutral = {"attn_factor": (1,), "yarn_attn_factor": (1,), "yarn_ext_factor": (1, -1)}
    neutral["yarn_log_multiplier"] = (0,)
    for name, value in scaling.items():
        if not any(_same(value, allowed) for allowed in neutral.get(name, ())):
            raise _refuse(f"{arch}.rope.scaling.{name}", value, "which isn't served")
    return found


def _check_unscaled(arch: str, scaling: dict[str, Any]) -> None:
    """Raises UsageError for a number that has an effect without YaRN."""
    for name, value in scaling.items():
        if not (name.startswith("yarn_") or (name == "attn_factor" and _same(value, 1))):
            raise _refuse(f"{arch}.rope.scaling.{name}", value, "which isn't served")


def _llama3(factors: Sequence[float], config: Any) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling; a file stores only the factors computed from them.

    Raises UsageError if Meta's parameters don't give these factors.
    """
    theta, dim = _rope(config).get("rope_theta"), _rotary_dim(config)
    factor = float(max(factors))
    if theta and len(factors) == dim // 2:
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        waves = [2 * math.pi * theta ** (2 * i / dim) for i in range(dim // 2)]
        turns = [_LLAMA3["original_max_position_embeddings"] / wave for wave in waves]
        smooth = [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]
        expected = [1 / ((1 - share) / factor + share) for share in smooth]
        if np.allclose(expected, factors, rtol=1e-4, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise _refuse(ROPE_FACTORS, len(factors), "factors, which aren't those of Llama 3.1's scaling")


def _same(value: Any, meant: Any) -> bool:
    """Whether two values are equal. Fractions are compared in float32, the file's precision."""
    if isinstance(value, list | str | int) or isinstance(meant, str):
        return bool(value == meant)
    return bool(np.float32(value) == np.float32(meant))


def _arch(keys: Keys) -> str:
    return str(keys["general.architecture"])


def _refuse(key: str, value: Any, why: str) -> UsageError:
    shown = f"{len(value)} values" if isinstance(value, list) else f"{value!r:.80}"
    return UsageError(
        f"it has {key} = {shown}, {why}: take the model as a Hugging Face folder instead"
    )
