"""Samples: at least one small geometry of every declared layout, with the sizes of its pool.

Each axis has a different size, so the tests notice when two axes are exchanged; widths are odd,
and there are several layers. `planes` repeats the declaration in numbers. The tests compare the
two, and the kit builds its pools by the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from kvtide.conformance.reference import is_of_request, map_holes
from kvtide.errors import first_line
from kvtide.layout import Geometry, Layout, Mapped, Striped
from kvtide.layout.compressed import COMPRESSED_4, COMPRESSED_128
from kvtide.layout.draft import MLA_TARGET_AND_DRAFT, TARGET_AND_DRAFT
from kvtide.layout.gqa import GQA, GQA_FUSED, GQA_HND, K_ONLY
from kvtide.layout.mla import DSA, MLA, MLA_NZ, MLA_PACKED, MLA_SPLIT
from kvtide.layout.plane import Size
from kvtide.layout.quantized import GQA_FP4, GQA_MXFP8, GQA_SCALED, MLA_FP4
from kvtide.layout.recurrent import RECURRENT, RECURRENT_AND_FULL, RECURRENT_AND_MLA
from kvtide.layout.window import WINDOW, WINDOW_AND_FULL

# A request moves from one row to another.
_LEAST_REQUESTS = 2

Shape = tuple[str, int, tuple[int, ...]]
"""A plane's dtype, the number of its layers, and the shape of a row."""


@final
@dataclass(frozen=True)
class Sample:
    """A layout with sizes, and its expected planes in order."""

    name: str
    layout: Layout
    dtype: str | Mapping[str, str]
    sizes: Mapping[str, Size]
    planes: Mapping[str, Shape]
    page_size: int = 4
    first_layer: int = 0
    request_count: int = 0
    """How many requests the planes of requests have rows for."""
    mapped_rows: Mapping[str, int] = field(default_factory=dict)
    """How many ids each of the layout's maps leads to."""

    @property
    def geometry(self) -> Geometry:
        """The layout bound to the sizes."""
        return self.bind()

    def bind(self, *, page_size: int | None = None, first_layer: int | None = None) -> Geometry:
        """The geometry, with another page size or for another stage if they are given."""
        return self.layout.bind(
            dtype=self.dtype,
            token=page_size or self.page_size,
            first_layer=self.first_layer if first_layer is None else first_layer,
            **dict[str, Any](self.sizes),
        )


_GQA = {"layer": 3, "head": 2, "head_dim": 5, "v_head_dim": 3}
_STATE = {"channel": 3, "width": 5, "head": 2, "head_dim": 7, "state": 3}
_SPLIT = {"layer": 4, "kv_lora_rank": 11, "qk_rope_head_dim": 5}


def _of(part: str, sizes: Mapping[str, int], **more: int) -> dict[str, Size]:
    """Sizes as the part of a composite layout has them."""
    return {f"{part}_{axis}": size for axis, size in {**sizes, **more}.items()}


_GROUPED = (
    Sample(
        "gqa", GQA, "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 5)), "v": ("bfloat16", 3, (2, 3))},
    ),
    Sample(
        "gqa-one-slot-pages", GQA, "float32", {**_GQA, "layer": 1, "head": 1},
        {"k": ("float32", 1, (1, 5)), "v": ("float32", 1, (1, 3))}, page_size=1,
    ),
    Sample(
        "gqa-fp8-late-stage", GQA, "float8_e4m3fn", {**_GQA, "layer": 2}, first_layer=5,
        planes={"k": ("float8_e4m3fn", 2, (2, 5)), "v": ("float8_e4m3fn", 2, (2, 3))},
    ),
    Sample(
        "gqa-dtypes-of-their-own", GQA, {"k": "float16", "v": "float8_e5m2"}, _GQA,
        {"k": ("float16", 3, (2, 5)), "v": ("float8_e5m2", 3, (2, 3))}, page_size=3,
    ),
    Sample(
        "gqa-context-parallel", GQA.through("gqa_dcp", Striped(1, 3)), "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 5)), "v": ("bfloat16", 3, (2, 3))}, page_size=6,
    ),
    Sample(
        "gqa_hnd", GQA_HND, "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 4, 5)), "v": ("bfloat16", 3, (2, 4, 3))},
    ),
    Sample(
        "gqa_hnd-one-head", GQA_HND, "float16", {**_GQA, "head": 1},
        {"k": ("float16", 3, (1, 5)), "v": ("float16", 3, (1, 3))},
    ),
    Sample(
        "gqa_hnd-one-slot-pages", GQA_HND, "int16", _GQA,
        {"k": ("int16", 3, (2, 5)), "v": ("int16", 3, (2, 3))}, page_size=1,
    ),
    Sample(
        "gqa_fused", GQA_FUSED, "int8", {"layer": 2, "head": 3, "head_dim": 5},
        {"kv": ("int8", 2, (2, 3, 3, 5))}, page_size=3,
    ),
    Sample("k_only", K_ONLY, "float16", {"layer": 2, "head": 3, "head_dim": 7},
           {"k": ("float16", 2, (3, 7))}),
)  # fmt: skip

_QUANTIZED = (
    Sample(
        "gqa_scaled", GQA_SCALED, "float8_e4m3fn", {**_GQA, "k_scale_dim": 1, "v_scale_dim": 2},
        {"k": ("float8_e4m3fn", 3, (2, 5)), "v": ("float8_e4m3fn", 3, (2, 3)),
         "k_scale": ("float32", 3, (2, 1)), "v_scale": ("float32", 3, (2, 2))},
    ),
    Sample(
        "gqa_fp4", GQA_FP4, "uint8",
        {"layer": 2, "head": 3, "packed_dim": 7, "v_packed_dim": 5, "k_scale_dim": 2,
         "v_scale_dim": 1},
        {"k": ("uint8", 2, (3, 7)), "v": ("uint8", 2, (3, 5)),
         "k_scale": ("uint8", 2, (3, 2)), "v_scale": ("uint8", 2, (3, 1))},
    ),
    Sample(
        "gqa_mxfp8", GQA_MXFP8, "float8_e5m2", {**_GQA, "scale_block": 3, "v_scale_block": 1},
        {"k": ("float8_e5m2", 3, (2, 5)), "v": ("float8_e5m2", 3, (2, 3)),
         "k_scale": ("uint8", 3, (2, 3, 4)), "v_scale": ("uint8", 3, (2, 1, 4))},
    ),
    Sample(
        "mla_fp4", MLA_FP4, "uint8", {"layer": 3, "packed_dim": 13, "scale_dim": 2},
        {"latent": ("uint8", 3, (1, 13)), "scale": ("uint8", 3, (2,))},
    ),
)  # fmt: skip

_LATENT = (
    Sample("mla", MLA, "bfloat16", {"layer": 3, "latent_dim": 9},
           {"kv": ("bfloat16", 3, (1, 9))}),
    Sample(
        "mla_split", MLA_SPLIT, "bfloat16", _SPLIT,
        {"latent": ("bfloat16", 4, (1, 11)), "rope": ("bfloat16", 4, (1, 5))},
    ),
    Sample(
        "mla_split-index-keys-on-some-layers", MLA_SPLIT, "bfloat16",
        {**_SPLIT, "index_layer": (1, 3), "index_head_dim": 7},
        {"latent": ("bfloat16", 4, (1, 11)), "rope": ("bfloat16", 4, (1, 5)),
         "index_k": ("bfloat16", 2, (1, 7))},
    ),
    Sample(
        "mla_split-index-scales", MLA_SPLIT,
        {"latent": "bfloat16", "rope": "bfloat16", "index_k": "int8", "index_scale": "float32"},
        {**_SPLIT, "index_layer": (0, 2, 3), "index_head_dim": 7, "index_scale_dim": 1},
        {"latent": ("bfloat16", 4, (1, 11)), "rope": ("bfloat16", 4, (1, 5)),
         "index_k": ("int8", 3, (1, 7)), "index_scale": ("float32", 3, (1,))},
        first_layer=7,
    ),
    Sample(
        "mla_packed", MLA_PACKED, "bfloat16", {"layer": 3, "record_bytes": 23},
        {"latent": ("uint8", 3, (1, 23))},
    ),
    Sample(
        "mla_packed-index-keys", MLA_PACKED, "bfloat16",
        {"layer": 3, "record_bytes": 23, "index_layer": (2,), "index_head_dim": 5,
         "index_scale_dim": 2},
        {"latent": ("uint8", 3, (1, 23)), "index_k": ("bfloat16", 1, (1, 5)),
         "index_scale": ("float32", 1, (2,))},
    ),
    Sample(
        "mla_nz", MLA_NZ, "bfloat16",
        {"layer": 2, "latent_tile": 3, "rope_tile": 2, "index_layer": (1,), "index_head_dim": 5},
        {"latent": ("bfloat16", 2, (3, 4, 16)), "rope": ("bfloat16", 2, (2, 4, 16)),
         "index_k": ("bfloat16", 1, (1, 5))},
    ),
    Sample(
        "mla_nz-one-tile", MLA_NZ, "float16", {"layer": 2, "latent_tile": 3, "rope_tile": 1},
        {"latent": ("float16", 2, (3, 4, 16)), "rope": ("float16", 2, (1, 16))},
    ),
    Sample(
        "dsa", DSA, "bfloat16",
        {"layer": 3, "latent_dim": 9, "index_layer": (0, 2), "index_page_bytes": 37},
        {"kv": ("bfloat16", 3, (1, 9)), "index_k": ("uint8", 2, (37,))},
    ),
    Sample(
        "dsa-tails", DSA, "bfloat16",
        {"layer": 3, "latent_dim": 9, "index_layer": 3, "index_page_bytes": 37,
         "tail_layer": (0, 2), "tail_token": 3, "index_head_dim": 7},
        {"kv": ("bfloat16", 3, (1, 9)), "index_k": ("uint8", 3, (37,)),
         "tail_k": ("bfloat16", 2, (3, 7)), "tail_score": ("float32", 2, (3,))},
        request_count=3,
    ),
)  # fmt: skip

_LIMITED = (
    Sample(
        "window", WINDOW, "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 5)), "v": ("bfloat16", 3, (2, 3))},
        mapped_rows={"full_to_window": 12},
    ),
    Sample(
        "window-context-parallel", WINDOW.through("window_dcp", Striped(1, 2)), "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 5)), "v": ("bfloat16", 3, (2, 3))},
        mapped_rows={"full_to_window": 24},
    ),
    Sample(
        "window-of-pages", GQA_HND.through("window_hnd", Mapped("full_to_window", hole=0)),
        "bfloat16", _GQA,
        {"k": ("bfloat16", 3, (2, 4, 5)), "v": ("bfloat16", 3, (2, 4, 3))},
        mapped_rows={"full_to_window": 48},
    ),
    Sample(
        "window_and_full", WINDOW_AND_FULL, "bfloat16",
        {**_of("full", _GQA, layer=2), **_of("window", _GQA, layer=5, head_dim=7)},
        {"full.k": ("bfloat16", 2, (2, 5)), "full.v": ("bfloat16", 2, (2, 3)),
         "window.k": ("bfloat16", 5, (2, 7)), "window.v": ("bfloat16", 5, (2, 3))},
        mapped_rows={"full_to_window": 11},
    ),
    Sample(
        "recurrent", RECURRENT, "bfloat16", {"layer": 2, **_STATE},
        {"conv": ("bfloat16", 2, (3, 5)), "ssm": ("float32", 2, (2, 7, 3))}, request_count=4,
    ),
    Sample(
        "recurrent_and_full", RECURRENT_AND_FULL, "bfloat16",
        {**_of("full", _GQA, layer=1), **_of("state", _STATE, layer=3)},
        {"full.k": ("bfloat16", 1, (2, 5)), "full.v": ("bfloat16", 1, (2, 3)),
         "state.conv": ("bfloat16", 3, (3, 5)), "state.ssm": ("float32", 3, (2, 7, 3))},
        request_count=3,
    ),
    Sample(
        "recurrent_and_mla", RECURRENT_AND_MLA, "bfloat16",
        {"full_layer": 2, "full_latent_dim": 9, **_of("state", _STATE, layer=3)},
        {"full.kv": ("bfloat16", 2, (1, 9)), "state.conv": ("bfloat16", 3, (3, 5)),
         "state.ssm": ("float32", 3, (2, 7, 3))},
        request_count=3,
    ),
    Sample(
        "compressed_4", COMPRESSED_4, "bfloat16", {"layer": 3, "latent_dim": 9},
        {"kv": ("bfloat16", 3, (1, 9))}, page_size=8,
    ),
    Sample(
        "compressed_4-pending", COMPRESSED_4, "bfloat16",
        {"layer": 3, "latent_dim": 9, "ring": 4},
        {"kv": ("bfloat16", 3, (1, 9)), "pending": ("bfloat16", 3, (4, 9))},
        page_size=8, request_count=3,
    ),
    Sample(
        "compressed_128", COMPRESSED_128, "float8_e4m3fn",
        {"layer": 2, "latent_dim": 9, "ring": 3},
        {"kv": ("float8_e4m3fn", 2, (1, 9)), "pending": ("float8_e4m3fn", 2, (3, 9))},
        page_size=128, request_count=3,
    ),
    Sample(
        "target_and_draft", TARGET_AND_DRAFT, "bfloat16",
        {**_of("target", _GQA), **_of("draft", _GQA, layer=1, head=1, head_dim=7)},
        {"target.k": ("bfloat16", 3, (2, 5)), "target.v": ("bfloat16", 3, (2, 3)),
         "draft.k": ("bfloat16", 1, (1, 7)), "draft.v": ("bfloat16", 1, (1, 3))},
    ),
    Sample(
        "mla_target_and_draft", MLA_TARGET_AND_DRAFT, "bfloat16",
        {"target_layer": 3, "target_latent_dim": 9, "draft_layer": 1, "draft_latent_dim": 7},
        {"target.kv": ("bfloat16", 3, (1, 9)), "draft.kv": ("bfloat16", 1, (1, 7))},
    ),
)  # fmt: skip

SAMPLES: tuple[Sample, ...] = (*_GROUPED, *_QUANTIZED, *_LATENT, *_LIMITED)


def mistake_in(sample: Sample) -> str | None:
    """What is wrong with a sample, on a line; None if its pools can be made and used."""
    try:
        planes = sample.geometry.planes
    except Exception as error:  # a layout of another's may raise anything
        return first_line(error)
    found = [(plane.name, (plane.dtype, plane.layer_count, plane.row_shape)) for plane in planes]
    if found != list(sample.planes.items()):
        return f"its planes are {found}, not {list(sample.planes.items())}"
    missing = [name for name in map_holes(sample.geometry) if not sample.mapped_rows.get(name)]
    if missing:
        return f"mapped_rows must say how many rows the maps {', '.join(missing)} lead to"
    if any(map(is_of_request, planes)) and sample.request_count < _LEAST_REQUESTS:
        needed = f"requests have rows, and need at least {_LEAST_REQUESTS}"
        return f"request_count is {sample.request_count}; {needed}"
    return None


def sample(name: str) -> Sample:
    """The sample with that name."""
    return next(sample for sample in SAMPLES if sample.name == name)
