from __future__ import annotations

import json

import pytest

from kvtide.cli.bench_layouts import AXES, bind_for_models, declared_layouts
from kvtide.cli.main import main
from kvtide.layout.compressed import COMPRESSED_128
from kvtide.layout.mla import MLA
from kvtide.layout.window import WINDOW_AND_FULL


def test_every_declared_layout_has_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """With ratios of its own, all above nothing."""
    arguments = ["bench", "copy", "--layouts", "--size", "1MiB", "--rounds", "1", "--json"]
    assert 0 == main(arguments)
    entries = json.loads(capsys.readouterr().out)["layouts"]
    assert [layout.name for layout in declared_layouts()] == [one["layout"] for one in entries]
    for entry in entries:
        ratios = [entry[key] for key in ("gather_ratio", "scatter_ratio", "seal_ratio")]
        assert all(ratio > 0 for ratio in ratios), entry["layout"]
        assert 0 < entry["row_bytes"][0] <= entry["row_bytes"][1]


def test_people_see_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Its row sizes beside its ratios."""
    assert 0 == main(["bench", "copy", "--layouts", "--size", "1MiB", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "pages of 64 tokens, scattered" in printed
    for layout in declared_layouts():
        assert 1 == sum(line.startswith(f"{layout.name} ") for line in printed.splitlines())


def test_axes_are_those_of_models() -> None:
    """By their own name, or in a joined layout by that behind the part's; all parts are there."""
    (latent,) = bind_for_models(MLA).planes
    assert (AXES["layer"], AXES["latent_dim"] * 2) == (latent.layer_count, latent.row_bytes)
    joined = bind_for_models(WINDOW_AND_FULL)
    assert [2048] * 4 == [plane.row_bytes for plane in joined.planes]


def test_a_page_holds_whole_rows() -> None:
    """Where more tokens share a row than a page has, the page is as long."""
    assert (64, 128) == (bind_for_models(MLA).page_size, bind_for_models(COMPRESSED_128).page_size)
