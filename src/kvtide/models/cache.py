"""Computes the geometry of a model's cache from its Hugging Face configuration.

Recurrent state, index keys, and the division of layers and heads over ranks follow SGLang 0.5.23.
Draft (MTP) layers belong to another model and aren't counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import final

from kvtide.errors import UsageError
from kvtide.layout.dtypes import DTYPE_BYTES
from kvtide.layout.gqa import GQA
from kvtide.layout.mla import DSA, MLA
from kvtide.layout.plane import Size
from kvtide.layout.recurrent import RECURRENT, RECURRENT_AND_FULL
from kvtide.layout.spec import Geometry, Layout
from kvtide.layout.window import WINDOW, WINDOW_AND_FULL
from kvtide.models.types import FULL, LINEAR, WINDOWED, Config, TextModel, text_model_of

_SCALE_BLOCK = 128
"""How many elements of an fp8 index key, or of a packed fp8 latent, share a float32 scale."""


@final
@dataclass(frozen=True, slots=True)
class ModelCache:
    """What one rank caches for a model's requests.

    `layers` are the layers of the rank's pipeline stage, out of `layer_count`. Layers with a window
    keep the last `window_tokens` tokens of a request; None means that there are no such layers.
    `has_padding` says that the heads don't divide evenly over the ranks, so some are padding.
    """

    model_type: str
    geometry: Geometry
    layers: range
    layer_count: int
    window_tokens: int | None
    has_padding: bool = False

    @property
    def lasting(self) -> Geometry:
        """The planes without a window, and the planes of the request."""
        return self._part(windowed=False)

    def bytes_of(self, token_count: int) -> int:
        """Bytes of a request of `token_count` tokens: its whole pages and its state."""
        page_size = self.geometry.page_size
        pages = -(-token_count // page_size)
        size_bytes = pages * self.lasting.page_bytes + self.geometry.request_bytes
        if self.window_tokens is not None:
            # A page is freed when its last token has left the window.
            left_pages = max(0, token_count - self.window_tokens) // page_size
            size_bytes += (pages - left_pages) * self._part(windowed=True).page_bytes
        return size_bytes

    def _part(self, *, windowed: bool) -> Geometry:
        planes = tuple(
            plane
            for plane in self.geometry.planes
            if windowed == any(rule.map_name is not None for rule in plane.rules)
        )
        return replace(self.geometry, planes=planes)


def cache_of(
    config: Config,
    *,
    dtype: str = "bfloat16",
    page_size: int = 16,
    tensor_ranks: int = 1,
    stages: int = 1,
) -> ModelCache:
    """What a rank of the largest pipeline stage caches for a model.

    `config` is a config.json as a mapping; `dtype` is the dtype of keys, values and latents. Heads
    are divided over `tensor_ranks`, and repeated if they are fewer than the ranks. If they don't
    divide evenly, each rank has as many as the fullest, as in SGLang on a CPU; other engines refuse
    that. Every rank has all latents and index keys. Layers are divided over `stages` in order; if
    they don't divide evenly, the last stages have one layer more, as in SGLang. Raises UsageError
    for an unknown model type or field, and for fewer layers than stages.
    """
    model = text_model_of(config)
    layers = _fullest_stage(model.layers, stages)
    binder = _Binder(model, layers, dtype, page_size, tensor_ranks)
    geometry = {"gqa": binder.gqa, "mla": binder.mla, "delta": binder.delta}[model.kind]()
    has_window = WINDOWED in model.layers[layers.start : layers.stop]
    window_tokens = model.number("sliding_window") if has_window else None
    return ModelCache(
        model.name,
        geometry,
        layers,
        len(model.layers),
        window_tokens,
        has_padding=any(binder.padded),
    )


def _fullest_stage(kinds: Sequence[str], stages: int) -> range:
    """The layers of the largest stage; among equals, of the stage that keeps the most tokens."""
    if not 1 <= stages <= len(kinds):
        raise UsageError(f"{len(kinds)} layers don't divide over {stages} pipeline stages")
    size, larger = divmod(len(kinds), stages)
    first_larger = stages - larger
    starts = [stage * size + max(0, stage - first_larger) for stage in range(stages + 1)]
    weight = {FULL: 2, WINDOWED: 1, LINEAR: 0}
    return max(
        (range(first, stop) for first, stop in pairwise(starts)),
        key=lambda layers: (len(layers), sum(weight[kinds[layer]] for layer in layers)),
    )


@final
@dataclass(frozen=True, slots=True)
class _Binder:
    """Binds the layout of each kind of model to a rank's sizes."""

    model: TextModel
    layers: range
    dtype: str
    page_size: int
    ranks: int
    padded: list[bool] = field(default_factory=list)
    """For each division of heads over the ranks, whether some heads are padding."""

    def gqa(self) -> Geometry:
        """Keys and values; some layers, all layers or none have a window."""
        full, window = self._layers_of(FULL), self._layers_of(WINDOWED)
        if full and window:
            sizes = {**self._heads("full_", full), **self._heads("window_", window)}
            return self._bind(WINDOW_AND_FULL, self.dtype, sizes)
        layout = WINDOW if window else GQA
        return self._bind(layout, self.dtype, self._heads("", len(self.layers)))

    def mla(self) -> Geometry:
        """Latents, and index keys with scales if the configuration has them.

        All index heads share one index key, in fp8; keys and scales of a page are stored together.
        In a model with index keys an fp8 latent is a record of bytes: the latent, its scales, and
        rope in bfloat16 (656 bytes for DeepSeek-V3.2). Source of the record: FlashMLA.
        """
        rank, rope = self.model.number("kv_lora_rank"), self.model.number("qk_rope_head_dim")
        sizes: dict[str, Size] = {"layer": len(self.layers), "latent_dim": rank + rope}
        has_keys = self.model.field("index_head_dim") is not None
        indexed = self._indexed_layers() if has_keys else ()
        if not indexed:
            return self._bind(MLA, self.dtype, sizes)
        sizes["index_layer"] = len(indexed) if len(indexed) == len(self.layers) else indexed
        key_bytes = _with_scales(self.model.number("index_head_dim"))
        sizes["index_page_bytes"] = self.page_size * key_bytes
        if DTYPE_BYTES.get(self.dtype) != 1:
            return self._bind(DSA, self.dtype, sizes)
        sizes["latent_dim"] = _with_scales(rank) + rope * DTYPE_BYTES["bfloat16"]
        return self._bind(DSA, "uint8", sizes)

    def delta(self) -> Geometry:
        """Keys and values in some layers; the state of a convolution and a delta net in the others.

        Source: SGLang's Mamba2StateShape, which its Qwen3-Next makes from the `linear_` fields.
        `conv` keeps the last inputs of query, key and value in the model's dtype, one fewer than
        the kernel's width. `ssm` is a matrix for each value head, float32 unless
        `mamba_ssm_dtype` says otherwise.
        """
        full, linear = self._layers_of(FULL), self._layers_of(LINEAR)
        if not linear:
            return self._bind(GQA, self.dtype, self._heads("", len(self.layers)))
        size = self.model.number
        all_key_heads = size("linear_num_key_heads")
        all_value_heads = size("linear_num_value_heads")
        key_heads, key_dim = self._divide(all_key_heads, repeats=False), "linear_key_head_dim"
        # A rank has the value heads of its key heads.
        value_heads = -(-key_heads * all_value_heads // all_key_heads)
        value_dim = "linear_value_head_dim"
        state: dict[str, Size] = {
            "layer": linear if full else len(linear),
            "channel": 2 * key_heads * size(key_dim) + value_heads * size(value_dim),
            "width": size("linear_conv_kernel_dim", least=2) - 1,
            "head": value_heads,
            "head_dim": size(value_dim),
            "state": size(key_dim),
        }
        dtype_field = "dtype" if self.model.field("dtype") else "torch_dtype"
        conv = self._dtype(dtype_field, "bfloat16")
        ssm = self._dtype("mamba_ssm_dtype", "float32")
        if not full:
            return self._bind(RECURRENT, {"conv": conv, "ssm": ssm}, state)
        dtypes = {"full.k": self.dtype, "full.v": self.dtype, "state.conv": conv, "state.ssm": ssm}
        sizes = {f"state_{axis}": size for axis, size in state.items()}
        return self._bind(RECURRENT_AND_FULL, dtypes, {**self._heads("full_", full), **sizes})

    def _bind(
        self, layout: Layout, dtype: str | Mapping[str, str], sizes: Mapping[str, Size]
    ) -> Geometry:
        first = self.layers.start
        return layout.bind(dtype=dtype, token=self.page_size, first_layer=first, rank=0, **sizes)

    def _layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer in self.layers if self.model.layers[layer] == kind)

    def _heads(self, prefix: str, layers: Size) -> dict[str, Size]:
        sizes: dict[str, Size] = {
            "layer": layers,
            "head": self._divide(self.model.kv_heads),
            "head_dim": self.model.head_dim,
            "v_head_dim": self.model.v_head_dim,
        }
        return {f"{prefix}{axis}": size for axis, size in sizes.items()}

    def _divide(self, heads: int, *, repeats: bool = True) -> int:
        """How many heads a rank has: its share, rounded up. Ranks may repeat a head."""
        self.padded.append(heads % self.ranks > 0 and not (repeats and self.ranks % heads == 0))
        return -(-heads // self.ranks)

    def _dtype(self, name: str, default: str) -> str:
        dtype = self.model.field(name) or default
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise self.model.error(f"{name} is {dtype!r}, which is unknown")
        return dtype

    def _indexed_layers(self) -> tuple[int, ...]:
        """The layers that choose tokens by index keys. Other layers use an earlier layer's choice.

        Source: the fields of GLM-5's configuration in transformers.
        """
        field, count = self.model.field, len(self.model.layers)
        kinds = field("indexer_types") or field("index_topk_pattern")
        if kinds is None:
            every = self.model.number("index_topk_freq") if field("index_topk_freq") else 1
            offset = 2
            if field("index_skip_topk_offset") is not None:
                offset = self.model.number("index_skip_topk_offset", least=0)
            return tuple(layer for layer in self.layers if max(0, layer - offset + 1) % every == 0)
        known = {"full": True, "F": True, "shared": False, "S": False}
        named = [str(kind) for kind in kinds] if isinstance(kinds, list | str) else []
        if len(named) != count or not known.keys() >= set(named):
            raise self.model.error(f"which of {count} layers have an indexer is unknown: {kinds}")
        return tuple(layer for layer in self.layers if known[named[layer]])


def _with_scales(width: int) -> int:
    """Bytes of `width` fp8 elements with their scales."""
    return width + -(-width // _SCALE_BLOCK) * DTYPE_BYTES["float32"]
