from __future__ import annotations

import json
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.layout import GQA, Layout, Plane, Striped
from kvtide.layout.compressed import COMPRESSED_128
from kvtide.layout.mla import MLA
from kvtide.layout.recurrent import RECURRENT
from kvtide.layout.window import WINDOW_AND_FULL
from kvtide.measure import copies, layouts
from kvtide.measure.layouts import (
    bind_for_models,
    bind_for_size,
    declared_layouts,
    size_of_axis,
)
from kvtide.pool import Pool


def test_every_declared_layout_has_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Each layout has its ratios, which are all positive."""
    arguments = ["bench", "copy", "--layouts", "--size", "1MiB", "--rounds", "1", "--json"]
    assert 0 == main(arguments)
    entries = json.loads(capsys.readouterr().out)["layouts"]
    assert [layout.name for layout in declared_layouts()] == [entry["layout"] for entry in entries]
    for entry in entries:
        ratios = [entry[key] for key in ("gather_ratio", "scatter_ratio", "seal_ratio")]
        assert all(ratio > 0 for ratio in ratios), entry["layout"]
        assert 0 < entry["row_bytes"][0] <= entry["row_bytes"][1]


def test_unlisted_axes_have_a_size() -> None:
    """An axis of layers has few, whatever its name."""
    assert [4, 4, 64] == [size_of_axis(name) for name in ("new_layer", "b.new_layer", "new")]


def test_axes_have_the_sizes_of_models() -> None:
    """An axis is found by its name, in a joined layout without the part's; no part is missing."""
    (latent,) = bind_for_models(MLA).planes
    assert (size_of_axis("layer"), size_of_axis("latent_dim") * 2) == (
        latent.layer_count,
        latent.row_bytes,
    )
    joined = bind_for_models(WINDOW_AND_FULL)
    assert [2048] * 4 == [plane.row_bytes for plane in joined.planes]


def test_a_new_axis_has_a_size() -> None:
    """A layout with a new axis needs no edit: it gets few layers, and rows that aren't tiny."""
    layout = Layout("new", Plane("phase", "echo_layer page token voice", dtype="uint8"))
    (plane,) = bind_for_models(layout).planes
    assert (4, (64,)) == (plane.layer_count, plane.row_shape)


def test_a_page_holds_whole_rows() -> None:
    """If more tokens share a row than a page has, the page gets longer."""
    assert (64, 128) == (bind_for_models(MLA).page_size, bind_for_models(COMPRESSED_128).page_size)


def test_a_page_holds_whole_turns_of_ranks() -> None:
    """Ranks that share a context keep tokens in turns, wherever a page lies."""
    assert 66 == bind_for_models(GQA.through("turns", Striped(1, 3))).page_size


def test_state_of_requests_has_enough_layers_for_the_size() -> None:
    """A request has only one row in each layer; layouts with tokens keep the axes' layers."""
    for size_bytes in (1 << 20, 64 << 20):
        geometry = bind_for_size(RECURRENT, size_bytes)
        moved_bytes = sum(plane.row_bytes * plane.layer_count for plane in geometry.planes)
        assert abs(moved_bytes - size_bytes) <= moved_bytes / geometry.planes[0].layer_count
    assert bind_for_models(MLA) == bind_for_size(MLA, 64 << 20)


def test_blocks_have_the_size_of_an_arena_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured blocks are the blocks that users get."""
    asked: list[str] = []

    def chunk_bytes_for(pool: Pool, limit_bytes: int) -> int:
        asked.append(pool.geometry.layout.name)
        assert limit_bytes >= 1 << 30
        return 1 << 21

    monkeypatch.setattr(layouts, "chunk_bytes_for", chunk_bytes_for)
    monkeypatch.setattr(layouts, "declared_layouts", lambda: [MLA])
    sizes: list[int] = []

    def noting(*args: Any, chunk_bytes: int) -> Any:
        sizes.append(chunk_bytes)
        return copies.make_moves(*args, chunk_bytes=chunk_bytes)

    monkeypatch.setattr(layouts, "make_moves", noting)
    assert ["mla"] == [figures.name for figures in layouts.measure_layouts(1 << 20, 1)]
    assert (["mla"], [1 << 21]) == (asked, sizes)
