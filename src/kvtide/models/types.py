"""Model types: how each attends, layer by layer, as its Hugging Face configuration says.

Only the types listed here are known. A configuration doesn't say by itself what a model caches:
layers that share their KV, or have rows of another width, show in fields that no other model has.
So a type that isn't listed is refused by name and never guessed, and so is a field by which a
listed type says more than its kind does.

Source: the configurations and attention of transformers 5.24, for which layers have a window where
`layer_types` is left out, and which fields may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from kvtide.errors import UsageError
from kvtide.models.sizes import DEFAULT_SIZES

Config = Mapping[str, Any]
"""A config.json, read."""

FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""The kinds of layers, as `layer_types` names them."""

_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_LARGEST = 1 << 24


@final
@dataclass(frozen=True, slots=True)
class _ModelType:
    """How a model type attends, and what its configurations may leave out.

    Without `layer_types`, `window` says which layers have one: `none`; `all`, if there is a
    `sliding_window`; `late`, from layer `max_window_layers` on, if `use_sliding_window`;
    `declared`: none may have one. With a `period` p each p-th layer attends in full and the
    others don't; a field may name another p.
    """

    kind: str = "gqa"
    window: str = "none"
    period: int = 0
    period_field: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """This type's names of fields that have another name elsewhere."""
    encodes: bool = False
    """Whether it attends to later tokens, unless `is_decoder` says otherwise."""
    single_head: str = ""
    """The field that, unless it is false, makes all heads share one head's keys and values."""
    many_heads: str = ""
    """The field that, if it is true, overrules `single_head`."""


def _types(names: str, **settings: Any) -> dict[str, _ModelType]:
    return {name: _ModelType(**settings) for name in names.split()}


_SHORT_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}
_DECODER_NAMES = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "hidden_size": "d_model",
}

_MODEL_TYPES = {
    **_types(
        "apertus apertus1p5_text arcee aria_text biogpt bitnet cohere dots1 emu3_text_model "
        "ernie4_5 ernie4_5_moe exaone flex_olmo gemma glm glm4 glm4_moe gpt_neox granite "
        "granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax "
        "internlm3 iquestcoder jais2 llama minimax_m2 nanochat nemotron olmo olmo2 olmoe opt "
        "persimmon phi qwen3_vl_text sarvam_moe seed_oss solar_open stablelm"
    ),
    **_types("codegen ctrl gpt2 gptj", aliases=_SHORT_NAMES),
    **_types("gpt_bigcode", aliases=_SHORT_NAMES, single_head="multi_query"),
    **_types(
        "falcon",
        aliases={"num_key_value_heads": "num_kv_heads"},
        single_head="multi_query",
        many_heads="new_decoder_architecture",
    ),
    **_types("jetmoe", aliases={"head_dim": "kv_channels"}),
    **_types("mistral mixtral phi3 phi4_multimodal phimoe starcoder2 ministral3", window="all"),
    **_types("qwen2 qwen3 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text", window="late"),
    **_types("cwm exaone4 qwen2_moe qwen3_moe qwen3_vl_moe_text smollm3", window="declared"),
    **_types("gemma2 gpt_oss", period=2),
    **_types("olmo3", period=4),
    **_types("gemma3_text", period=6, period_field="sliding_window_pattern"),
    **_types("cohere2", period=4, period_field="sliding_window_pattern"),
    **_types("deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa", kind="mla"),
    **_types(
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        kind="delta",
        period=4,
        period_field="full_attention_interval",
    ),
    **_types(
        "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm "
        "roc_bert xlm-roberta xlm-roberta-xl xmod",
        encodes=True,
    ),
    **_types(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart",
        aliases=_DECODER_NAMES,
    ),
}
_LAYER_TYPES = {"gqa": {FULL, WINDOWED}, "mla": {FULL, *_INDEXED}, "delta": {FULL, LINEAR}}
_KNOWN = (
    "keys and values, in full or in windows (such as llama, qwen3, mistral, gemma3_text, gpt_oss), "
    "latents, with index keys or without (deepseek_v3, deepseek_v32), "
    "gated delta nets beside keys and values (qwen3_next)"
)
_TEXT_PARTS = ("text_config", "language_config", "llm_config")

# Each changes what is cached, in a way that no kind here covers.
_FOREIGN = {
    "is_encoder_decoder": "it attends across to an encoder",
    "add_cross_attention": "it attends across to an encoder",
    "cross_attention_layers": "some layers attend across to an encoder",
    "use_bidirectional_attention": "it attends to later tokens",
    "attention_chunk_size": "its attention is chunked",
    "num_kv_shared_layers": "some layers share their KV",
    "swa_num_key_value_heads": "the layers with a window have other heads",
    "per_layer_config": "its sizes differ from layer to layer",
    "global_head_dim": "the layers without a window have other heads",
}


@final
@dataclass(frozen=True, slots=True)
class TextModel:
    """What a configuration says of its language model, checked as it is read.

    `kind` is `gqa`, `mla` or `delta` (gated delta nets beside GQA), `layers` the kind of each
    layer.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    text: Config
    model: _ModelType

    def field(self, name: str) -> Any:
        """The field's value, or the type's default; None if there is neither."""
        return self.text.get(self._name_of(name), DEFAULT_SIZES.get(self.name, {}).get(name))

    def _name_of(self, name: str) -> str:
        """The field's name in this configuration: its type's, or the usual one."""
        alias = self.model.aliases.get(name, name)
        return name if alias not in self.text and name in self.text else alias

    def number(self, name: str, *, least: int = 1) -> int:
        """A size. Raises UsageError for a field that is missing or holds no size."""
        value, name = self.field(name), self._name_of(name)
        if type(value) is int and least <= value <= _LARGEST:
            return value
        if value is None and name not in self.text:
            raise self.error(f"the configuration has no {name}")
        raise self.error(f"{name} is {value!r}, which isn't an integer from {least} to {_LARGEST}")

    def error(self, reason: str) -> UsageError:
        """An error of one line that names the model type."""
        return UsageError(f"model type {self.name!r}: {reason}")

    @property
    def head_dim(self) -> int:
        """Elements of one head's key."""
        if self.model.kind == "mla" and self.field("qk_nope_head_dim"):
            return self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
        if self.model.kind != "mla" and self.field("head_dim") is not None:
            return self.number("head_dim")
        width, heads = self.number("hidden_size"), self.number("num_attention_heads")
        if width % heads:
            raise self.error(
                f"there is no head_dim, and hidden_size {width} doesn't divide into {heads} heads"
            )
        return width // heads

    @property
    def v_head_dim(self) -> int:
        """Elements of one head's value."""
        if self.model.kind == "mla" and self.field("v_head_dim"):
            return self.number("v_head_dim")
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        """Heads whose keys and values are cached: one for each attention head unless a field says
        otherwise."""
        model, text = self.model, self.text
        if (
            model.single_head
            and text.get(model.single_head, True)
            and not text.get(model.many_heads)
        ):
            return 1
        if self.field("num_key_value_heads") is None:
            return self.number("num_attention_heads")
        return self.number("num_key_value_heads")


def text_model_of(config: Config) -> TextModel:
    """Reads the part of `config` that is the language model.

    Raises UsageError for a model type that isn't known, layers of a type that isn't known for
    it, or a field that says something no kind here covers.
    """
    text = _text_of(config)
    name = text.get("model_type")
    if not isinstance(name, str):
        fields = ", ".join(("model_type", *_TEXT_PARTS))
        raise UsageError(f"this isn't a model's configuration: none of {fields} names a model type")
    model = _MODEL_TYPES.get(name, _ModelType())
    # DeepSeek's smaller models have no latents, and may give their sizes all the same.
    has_latents = model.kind == "mla" and text.get("use_mla") is not False
    kind = "gqa" if model.kind == "mla" and not has_latents else model.kind
    bare = TextModel(name, kind, (), text, model)
    for foreign, reason in _FOREIGN.items():
        if text.get(foreign):
            value = repr(text[foreign])[:60]
            raise bare.error(f"{reason} ({foreign} is {value}), which isn't known")
    if name not in _MODEL_TYPES:
        raise bare.error(
            f"it isn't known, and what it caches isn't guessed from its fields{_summary(text)}; "
            f"known are {_KNOWN}"
        )
    if model.kind != "mla" and text.get("kv_lora_rank") is not None:
        raise bare.error(f"kv_lora_rank is {text['kv_lora_rank']!r}; it isn't known for latents")
    if model.encodes and not text.get("is_decoder"):
        raise bare.error(
            "its attention isn't causal (is_decoder is false), so there is no cache to speak of"
        )
    return TextModel(name, kind, _layers(bare), text, model)


def _text_of(config: Config) -> Config:
    """The part that describes the language model."""
    for name in _TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            return _text_of(config[name])
    return config


def _summary(text: Config) -> str:
    """What the fields of an unknown type say about its cache, in brackets."""
    said = [
        f"{name} is {repr(text[name])[:60]}"
        for name in ("kv_lora_rank", "sliding_window")
        if text.get(name) is not None
    ]
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        said.insert(0, f"its layers are {', '.join(sorted({str(kind)[:40] for kind in kinds}))}")
    return f" ({'; '.join(said)})" if said else ""


def _layers(bare: TextModel) -> tuple[str, ...]:
    """The kind of each layer: full, windowed or linear. Indexed ones attend in full."""
    count, listed = bare.number("num_hidden_layers"), bare.text.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != count):
        length = len(listed) if isinstance(listed, list) else repr(listed)
        raise bare.error(f"layer_types has {length} entries for num_hidden_layers {count}")
    kinds = _default_layers(bare, count) if listed is None else [str(kind) for kind in listed]
    foreign = sorted(set(kinds) - _LAYER_TYPES[bare.kind])
    if foreign:
        raise bare.error(
            f"layer_types has {', '.join(foreign)}, which isn't known; known for it are "
            f"{', '.join(sorted(_LAYER_TYPES[bare.kind]))}"
        )
    kinds = [FULL if kind in _INDEXED else kind for kind in kinds]
    if WINDOWED in kinds:
        window, limit = bare.number("sliding_window"), bare.field("max_position_embeddings")
        if isinstance(limit, int) and window >= limit:  # no token ever leaves
            return (FULL,) * count
    return tuple(kinds)


def _default_layers(bare: TextModel, count: int) -> list[str]:
    """What transformers makes of a configuration without `layer_types`."""
    model = bare.model
    if model.period:
        other = LINEAR if model.kind == "delta" else WINDOWED
        named = model.period_field and bare.field(model.period_field) is not None
        period = bare.number(model.period_field) if named else model.period
        return [other if (layer + 1) % period else FULL for layer in range(count)]
    has_window = bare.field("sliding_window") is not None
    if model.window in ("late", "declared"):
        used = bare.text.get("use_sliding_window", model.window == "declared")
        has_window = bare.text.get("sliding_window") is not None and bool(used)
    if model.window == "none" or not has_window:
        return [FULL] * count
    if model.window == "declared":
        raise bare.error("there is a sliding_window, and no layer_types to say in which layers")
    first = bare.number("max_window_layers", least=0) if model.window == "late" else 0
    return [WINDOWED if layer >= first else FULL for layer in range(count)]
