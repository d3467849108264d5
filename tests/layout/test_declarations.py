"""The declared layouts have the published sizes and the right rows."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.conformance import SAMPLES, Sample
from kvtide.errors import LayoutError
from kvtide.layout import GQA, EveryToken, Geometry, Layout, Mapped, OfRequest, Striped
from kvtide.layout.compressed import COMPRESSED_4, COMPRESSED_128
from kvtide.layout.draft import TARGET_AND_DRAFT
from kvtide.layout.mla import DSA, MLA, MLA_NZ, MLA_PACKED, MLA_SPLIT
from kvtide.layout.quantized import GQA_MXFP8, MLA_FP4
from kvtide.layout.recurrent import RECURRENT_AND_FULL
from kvtide.layout.window import WINDOW, WINDOW_AND_FULL


def test_mla_costs_what_deepseek_v3_publishes() -> None:
    """It is 70,272 bytes a token in bfloat16: 61 layers of 512 + 64, in one plane or in two."""
    fused = MLA.bind(dtype="bfloat16", token=64, layer=61, latent_dim=576)
    split = MLA_SPLIT.bind(
        dtype="bfloat16", token=128, layer=61, kv_lora_rank=512, qk_rope_head_dim=64
    )
    assert 61 * (512 + 64) * 2 == 70_272 == fused.token_bytes == split.token_bytes


def test_gqa_costs_what_llama_3_does() -> None:
    """Llama 3 8B takes 131,072 bytes a token in bfloat16."""
    geometry = GQA.bind(dtype="bfloat16", token=16, layer=32, head=8, head_dim=128, v_head_dim=128)
    assert 131_072 == geometry.token_bytes


def test_nz_tiles_hold_a_page_of_sixteen_columns_each() -> None:
    """The bytes are as many as in ND, in rows of whole pages."""
    nz = MLA_NZ.bind(dtype="bfloat16", token=128, layer=2, latent_tile=32, rope_tile=4)
    nd = MLA_SPLIT.bind(dtype="bfloat16", token=128, layer=2, kv_lora_rank=512, qk_rope_head_dim=64)
    assert nd.page_bytes == nz.page_bytes
    assert [(32, 128, 16), (4, 128, 16)] == [plane.row_shape for plane in nz.planes]
    assert [128, 128] == [plane.tokens_per_row for plane in nz.planes]


def test_packed_records_are_one_plane_of_bytes() -> None:
    """A token has 656 bytes in each layer: 512 of fp8, four scales, 64 bfloat16 of rotary key."""
    geometry = MLA_PACKED.bind(dtype="bfloat16", token=64, layer=1, record_bytes=656)
    assert (656, ("uint8",)) == (geometry.token_bytes, tuple(p.dtype for p in geometry.planes))


def test_only_layers_with_index_keys_pay_for_them() -> None:
    """One layer of three has index keys and their scales."""
    sizes: dict[str, Any] = {"layer": 3, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
    plain = MLA_SPLIT.bind(dtype="bfloat16", **sizes)
    indexed = MLA_SPLIT.bind(
        dtype="bfloat16", **sizes, index_layer=(1,), index_head_dim=128, index_scale_dim=1
    )
    assert plain.token_bytes + 128 * 2 + 4 == indexed.token_bytes


def test_index_layers_are_told_apart_by_number() -> None:
    """Equally many layers with other numbers are another geometry; a count means the first ones."""
    sizes: dict[str, Any] = {"layer": 3, "latent_dim": 4, "index_page_bytes": 8}
    prints = {
        DSA.bind(dtype="bfloat16", **sizes, index_layer=layers).fingerprint
        for layers in ((0, 1), (0, 2), (1, 2), 2)
    }
    assert 3 == len(prints)


@pytest.mark.parametrize(("layout", "ratio"), [(COMPRESSED_4, 4), (COMPRESSED_128, 128)])
def test_compressed_row_holds_as_many_tokens_as_its_ratio(layout: Layout, ratio: int) -> None:
    """A token costs its share of a row; pending tokens cost the request."""
    geometry = layout.bind(dtype="bfloat16", token=256, layer=2, latent_dim=64, ring=8)
    assert 256 // ratio * 2 * 64 * 2 == geometry.page_bytes
    assert 2 * 8 * 64 * 2 == geometry.request_bytes


def test_interleaved_scales_have_page_rows_and_values_token_rows() -> None:
    """One layout has planes with two different rules."""
    sizes = {"head": 2, "head_dim": 64, "v_head_dim": 64, "scale_block": 2, "v_scale_block": 2}
    geometry = GQA_MXFP8.bind(dtype="float8_e4m3fn", token=16, layer=1, **sizes)
    assert [1, 1, 16, 16] == [plane.tokens_per_row for plane in geometry.planes]
    assert 16 * 2 * (64 + 64 + 2 + 2) == geometry.page_bytes


def test_packed_fp4_is_half_as_wide() -> None:
    """A byte holds two values, and each block of 32 has a scale."""
    geometry = MLA_FP4.bind(dtype="uint8", layer=1, packed_dim=576 // 2, scale_dim=576 // 32)
    assert 288 + 18 == geometry.token_bytes


def test_window_goes_through_its_map_and_full_attention_does_not() -> None:
    """One snapshot holds both kinds of planes."""
    full, _, window, _ = WINDOW_AND_FULL.planes
    assert (EveryToken(),) == full.rows
    assert (EveryToken(), Mapped("full_to_window", hole=0)) == window.rows


def test_context_parallel_rank_of_a_window_has_two_rules() -> None:
    """The map comes first, then the rank's share; another rank is another geometry."""
    sizes = {"layer": 1, "head": 1, "head_dim": 2, "v_head_dim": 2}
    ranks = [WINDOW.through("window_dcp", Striped(rank, 4)) for rank in range(4)]
    rules = ranks[2].planes[0].rows
    assert (EveryToken(), Mapped("full_to_window", hole=0), Striped(2, 4)) == rules
    assert 4 == len({rank.bind(dtype="bfloat16", **sizes).fingerprint for rank in ranks})


def test_state_belongs_to_the_request() -> None:
    """It costs nothing for each token."""
    sizes = {"channel": 8, "width": 4, "head": 2, "head_dim": 4, "state": 4}
    geometry = RECURRENT_AND_FULL.bind(
        dtype="bfloat16", full_layer=1, full_head=1, full_head_dim=8, full_v_head_dim=8,
        state_layer=3, **{f"state_{axis}": size for axis, size in sizes.items()},
    )  # fmt: skip
    assert [(OfRequest(),)] * 2 == [plane.rules for plane in geometry.planes[2:]]
    assert (32, 3 * (8 * 4 * 2 + 2 * 4 * 4 * 4)) == (geometry.token_bytes, geometry.request_bytes)


def test_draft_has_its_own_layers() -> None:
    """The names of its axes begin with `draft`."""
    assert ["target.k", "target.v", "draft.k", "draft.v"] == [
        plane.name for plane in TARGET_AND_DRAFT.planes
    ]
    with pytest.raises(LayoutError, match="draft_layer"):
        TARGET_AND_DRAFT.bind(dtype="bfloat16", target_layer=2)


def geometries() -> list[tuple[str, Geometry]]:
    """Lists the geometries of all samples."""
    return [(sample.name, sample.geometry) for sample in SAMPLES]


def test_samples_have_different_fingerprints() -> None:
    """KV of one geometry must never be taken for KV of another."""
    found = geometries()
    assert len(found) == len({geometry.fingerprint for _, geometry in found})


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_page_size_counts_only_if_a_row_is_a_page(sample: Sample) -> None:
    """Otherwise it says how slots are handed out, not which bytes a token owns."""
    geometry = sample.geometry
    other = sample.bind(page_size=2 * sample.page_size)
    of_pages = any(plane.unit == "page" for plane in (*geometry.planes, *other.planes))
    assert of_pages == (geometry.fingerprint != other.fingerprint)
