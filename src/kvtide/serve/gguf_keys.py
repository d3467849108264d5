"""What a GGUF file says of its model, key by key, against the model that would answer.

Transformers takes some keys of a file into a configuration and drops the others without a word; so
the file and the configuration are compared here, whatever happened in between. Each key is what the
configuration says as well, or has no effect, or the file is refused by that key. Scaled positions
and some widths are carried over, as a folder of the same model has them. What a key means is
llama.cpp's word, whose format this is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvtide.errors import UsageError
from kvtide.serve.adapter_files import TEXT_SPLITS

Keys = Mapping[str, Any]
"""A file's keys with their values; an array of texts is given by its length."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that divides the frequencies of a Llama 3.1 or later."""

# What the file says of itself, and of the text around the model. By the last a publisher of many
# files says when and where each was made.
_NO_PART_OF_THE_MODEL = ("general.", "tokenizer.", "quantize.", "imatrix.", "mradermacher.")
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEXT_SPLIT = "tokenizer.ggml.pre"
# GPT-2's way, which transformers takes where it doesn't know a name; "default" says nothing.
_AS_GPT_2 = {"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum"}
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_ROPE_SCALING = ("rope.scaling.", "rope.scale_linear")
# Meta's own choice for every model that has such factors, and what converters take for granted.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _of(*names: str) -> Callable[[Any], Any]:
    """Reads the first of these attributes that a configuration has."""

    def read(config: Any) -> Any:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    return read


def _head_dim(config: Any) -> Any:
    return _of("head_dim")(config) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rotary_dim(config: Any) -> Any:
    share = _rope(config).get("partial_rotary_factor") or _of("partial_rotary_factor")(config)
    return int(_head_dim(config) * (1.0 if share is None else share))


_EPSILON = _of("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
# What a key says, as the configuration has it; None where it has no such thing.
_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "vocab_size": _of("vocab_size"),
    "context_length": _of("max_position_embeddings"),
    "embedding_length": _of("hidden_size"),
    "block_count": _of("num_hidden_layers"),
    "feed_forward_length": lambda config: (
        _of("intermediate_size", "n_inner")(config) or 4 * config.hidden_size
    ),
    "use_parallel_residual": _of("use_parallel_residual"),
    "attention.head_count": _of("num_attention_heads"),
    "attention.head_count_kv": _of("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_rms_epsilon": _of("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.scale": lambda config: (
        (_of("query_pre_attn_scalar")(config) or _head_dim(config)) ** -0.5
    ),
    "attention.sliding_window": _of("sliding_window"),
    "attn_logit_softcapping": _of("attn_logit_softcapping"),
    "final_logit_softcapping": _of("final_logit_softcapping"),
    "rope.dimension_count": _rotary_dim,
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "expert_count": _of("num_experts", "num_local_experts"),
    "expert_used_count": _of("num_experts_per_tok"),
    "expert_feed_forward_length": _of("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _of("shared_expert_intermediate_size"),
    "expert_weights_norm": _of("norm_topk_prob"),
}
# Widths for which transformers has those of one model of each kind.
_WIDTHS = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Values that stand for nothing: no such part, no such limit, a factor of one.
_NONE: dict[str, tuple[Any, ...]] = {
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
    "expert_gating_func": (1,),  # softmax, which all models served here have
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # the order of rows that is undone anyway
}
# What llama.cpp takes where a file says none of these, and transformers may not; None: it wants to
# be told.
_DEFAULTS: dict[tuple[str, ...], Callable[[Any], Any] | None] = {
    ("rope.freq_base",): lambda _: 10000.0,
    ("attention.scale",): lambda config: _head_dim(config) ** -0.5,
    ("attention.head_count",): None,
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"): None,
    ("expert_used_count",): None,
}


def complete(config: Any, keys: Keys, factors: Sequence[float] | None) -> None:
    """Gives a configuration what transformers leaves in the file, before the model is made of it.

    Those are widths of heads and experts, and scaled positions. `factors` are the numbers of the
    tensor `ROPE_FACTORS`, if the file has one. Raises UsageError for a scaling that can't be given
    as the folder of such a model has it.
    """
    arch = _arch(keys)
    for name, attribute in _WIDTHS.items():
        width = keys.get(f"{arch}.{name}")
        if isinstance(width, int) and getattr(config, attribute, None) is not None:
            setattr(config, attribute, width)
    found = _scaling_of(keys, config)
    if factors is not None and any(one != 1 for one in factors):
        if found:
            raise _refuse(ROPE_FACTORS, len(factors), "factors, and scales its positions besides")
        found = _llama3(factors, config)
    if found and "rope_theta" not in _rope(config):
        raise _refuse(f"{arch}.rope.scaling", found, "and the model would be run without")
    if found:
        config.rope_parameters = {**_rope(config), **found}


def _scaling_of(keys: Keys, config: Any) -> dict[str, Any]:
    """How a file's keys scale positions, as a configuration says it; empty where they don't."""
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
    scaling.pop("finetuned", None)  # says whether the model was trained with it
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
    """Raises UsageError, by its name, for a key that the model would be run without."""
    arch = _arch(keys)
    kind = keys.get("general.type", "model")
    if kind != "model":
        raise UsageError(f"the file is no model: general.type is {kind!r}")
    parts = keys.get("split.count", 1)
    if parts > 1:
        raise UsageError(
            f"the file is one of {parts} parts: put them together with llama-gguf-split --merge"
        )
    own = {}
    for key, value in _of_the_model(keys).items():
        if not key.startswith(f"{arch}."):
            raise _refuse(key, value, "and the model would be run without")
        own[key.removeprefix(f"{arch}.")] = value
    if own.get("attention.scale") == 0:
        del own["attention.scale"]  # as much as nothing said
    for name, value in own.items():
        if not name.startswith(_ROPE_SCALING):
            _check_key(arch, name, value, config)
    for names, default in _DEFAULTS.items():
        meant = next((one for name in names if (one := _MEANINGS[name](config)) is not None), None)
        told = meant is None or not own.keys().isdisjoint(names)
        if not told and not (default and _same(default(config), meant)):
            raise UsageError(
                f"the file doesn't say {arch}.{' or '.join(names)}, and the model would be run "
                f"with {meant}"
            )


def has_digits_apart(keys: Keys) -> bool:
    """Whether each digit of a text is a word, and otherwise words are GPT-2's.

    Raises UsageError where the file cuts texts in a way that isn't known: the model would read
    other tokens than it has learned.
    """
    split = keys.get(_TEXT_SPLIT, "default")
    if keys.get("tokenizer.ggml.model") != "gpt2" or split in TEXT_SPLITS | _AS_GPT_2:
        return False
    if split not in _DIGITS_APART:
        raise _refuse(_TEXT_SPLIT, split, "and texts would be cut into words as for GPT-2")
    return True


def has_no_space_before(keys: Keys) -> bool:
    """Whether a text begins as it is, where SentencePiece's way is to put a space before it."""
    is_sentencepiece = keys.get("tokenizer.ggml.model") == "llama"
    return is_sentencepiece and keys.get("tokenizer.ggml.add_space_prefix") is False


def ends_of(keys: Keys) -> list[int]:
    """The tokens that end an answer: of a text, of a turn, and of a message to a tool."""
    told = [keys.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return sorted({one for one in told if isinstance(one, int)})


def _check_key(arch: str, name: str, value: Any, config: Any) -> None:
    meant = _MEANINGS[name](config) if name in _MEANINGS else None
    if meant is not None and _same(value, meant):
        return
    if _stands_for_nothing(name, value) and (meant is None or _stands_for_nothing(name, meant)):
        return
    is_window = name == "attention.sliding_window" and isinstance(value, int)
    if is_window and not meant and value >= config.max_position_embeddings:
        return  # nothing ever leaves it
    run = "without" if meant is None else f"with {meant}"
    raise _refuse(f"{arch}.{name}", value, f"and the model would be run {run}")


def _stands_for_nothing(name: str, value: Any) -> bool:
    return any(_same(value, none) for none in _NONE.get(name, ()))


def _of_the_model(keys: Keys) -> dict[str, Any]:
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
        if not any(_same(value, none) for none in neutral.get(name, ())):
            raise _refuse(f"{arch}.rope.scaling.{name}", value, "which isn't served")
    return found


def _check_unscaled(arch: str, scaling: dict[str, Any]) -> None:
    """Without YaRN its numbers are read by nobody; the one for attention is."""
    for name, value in scaling.items():
        if not (name.startswith("yarn_") or (name == "attn_factor" and _same(value, 1))):
            raise _refuse(f"{arch}.rope.scaling.{name}", value, "which isn't served")


def _llama3(factors: Sequence[float], config: Any) -> dict[str, Any]:
    """The scaling of Llama 3.1 that gives these factors, which the file has instead of its numbers.

    Where other numbers than Meta's were used the factors don't come out, and it is refused.
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
    """Whether two values are equal; fractions in the file's precision, which is float32."""
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
