"""Model types: how the layers of each attend, read from its Hugging Face configuration.

Only the types listed here are known. A configuration alone doesn't say what a model caches: shared
KV, or rows of another width, show only in fields that no other model has. So an unlisted type is
refused and never guessed. A field that changes the cache in an unknown manner is refused, too.

Source: the configurations and the attention of transformers 5.24. They say which layers have a
window if `layer_types` is missing, and which fields may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from kvtide.errors import UsageError
from kvtide.models.sizes import DEFAULT_SIZES

Config = Mapping[str, Any]
"""The contents of a config.json."""

FULL, WINDOWED, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""The kinds of layers, as `layer_types` names them."""

_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_LARGEST = 1 << 24


@final
@dataclass(frozen=True, slots=True)
class _ModelType:
    """How a model type attends, and which fields its configurations may leave out.

    If `layer_types` is missing, `window` says which layers have a window. `none`: no layer. `all`:
    all layers, if there is a `sliding_window`. `late`: the layers from `max_window_layers` on, if
    `use_sliding_window`. `declared`: no layer, and a `sliding_window` is refused. With a `period` p
    each p-th layer attends in full and the others don't; the field `period_field` may change p.
    """

    kind: str = "gqa"
    window: str = "none"
    period: int = 0
    period_field: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """This type's names for usual fields, by the usual name."""
    encodes: bool = False
    """Whether it attends to later tokens unless `is_decoder` is true."""
    single_head: str = ""
    """The field that, unless it is false, makes all heads share a single key and value head."""
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

# Each of these fields changes the cache in a manner that no kind here covers.
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
    """The language model in a configuration; fields are checked when they are read.

    `kind` is `gqa`, `mla` or `delta` (gated delta nets and GQA). `layers` has the kind of each
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
        """The field's name in this configuration: its type's name or the usual name."""
        alias = self.model.aliases.get(name, name)
        return name if alias not in self.text and name in self.text else alias

    def number(self, name: str, *, least: int = 1) -> int:
        """A field that is a size. Raises UsageError if it is missing or invalid."""
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
        """How many elements the key of a head has."""
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
        """How many elements the value of a head has."""
        if self.model.kind == "mla" and self.field("v_head_dim"):
            return self.number("v_head_dim")
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        """How many heads have cached keys and values: as many as attend, unless a field differs."""
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

    Raises UsageError for an unknown model type, an unknown layer type, or a field that changes the
    cache in an unknown manner.
    """
    text = _text_of(config)
    name = text.get("model_type")
    if not isinstance(name, str):
        fields = ", ".join(("model_type", *_TEXT_PARTS))
        raise UsageError(f"this isn't a model's configuration: none of {fields} names a model type")
    model = _MODEL_TYPES.get(name, _ModelType())
    # DeepSeek's smaller models have no latents, but may state their sizes.
    has_latents = model.kind == "mla" and text.get("use_mla") is not False
    kind = "gqa" if model.kind == "mla" and not has_latents else model.kind
    bare = TextModel(name, kind, (), text, model)
    for foreign, reason in _FOREIGN.items():
        if text.get(foreign):
            value = repr(text[foreign])[:60]
            raise bare.error(f"{reason} ({foreign} is {value}), which isn't supported")
    if name not in _MODEL_TYPES:
        raise bare.error(
            f"it is unknown, and its cache isn't guessed from its fields{_summary(text)}; "
            f"known are {_KNOWN}"
        )
    if model.kind != "mla" and text.get("kv_lora_rank") is not None:
        raise bare.error(f"kv_lora_rank is {text['kv_lora_rank']!r}, but this type has no latents")
    if model.encodes and not text.get("is_decoder"):
        raise bare.error("its attention isn't causal (is_decoder is false), so it has no cache")
    return TextModel(name, kind, _layers(bare), text, model)


def _text_of(config: Config) -> Config:
    """The part that describes the language model."""
    for name in _TEXT_PARTS:
        if isinstance(config.get(name), Mapping):
            return _text_of(config[name])
    return config


def _summary(text: Config) -> str:
    """The fields of an unknown type that concern its cache, in brackets."""
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
    """The kind of each layer: full, windowed or linear. Indexed layers attend in full."""
    count, listed = bare.number("num_hidden_layers"), bare.text.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != count):
        length = len(listed) if isinstance(listed, list) else repr(listed)
        raise bare.error(f"layer_types has {length} entries for num_hidden_layers {count}")
    kinds = _default_layers(bare, count) if listed is None else [str(kind) for kind in listed]
    foreign = sorted(set(kinds) - _LAYER_TYPES[bare.kind])
    if foreign:
        raise bare.error(
            f"layer_types has {', '.join(foreign)}, which is unknown; known for it are "
            f"{', '.join(sorted(_LAYER_TYPES[bare.kind]))}"
        )
    kinds = [FULL if kind in _INDEXED else kind for kind in kinds]
    if WINDOWED in kinds:
        window, limit = bare.number("sliding_window"), bare.field("max_position_embeddings")
        if isinstance(limit, int) and window >= limit:  # no token leaves the window
            return (FULL,) * count
    return tuple(kinds)


def _default_layers(bare: TextModel, count: int) -> list[str]:
    """The kinds of layers that transformers assumes if `layer_types` is missing."""
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
        raise bare.error("there is a sliding_window, but no layer_types say which layers have it")
    first = bare.number("max_window_layers", least=0) if model.window == "late" else 0
    return [WINDOWED if layer >= first else FULL for layer in range(count)]
