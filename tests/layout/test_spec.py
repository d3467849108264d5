from __future__ import annotations

from typing import Any

import pytest

from kvtide.errors import LayoutError
from kvtide.layout import GQA, Layout, Plane
from support.pools import small_geometry
from support.values import NO_ROWS, ONES, name_of

SIZES = {"layer": 3, "token": 16, "head": 2, "head_dim": 64, "v_head_dim": 48}


def test_geometry_counts_the_bytes_of_all_planes_and_layers() -> None:
    """A token owns head * (head_dim + v_head_dim) elements a layer, a page `token` times that."""
    geometry = GQA.bind(dtype="float32", **SIZES)
    token_bytes = 3 * 2 * (64 + 48) * 4
    assert (token_bytes, 16 * token_bytes) == (geometry.token_bytes, geometry.page_bytes)
    assert 16 == geometry.page_size


@pytest.mark.parametrize(
    ("dtype", "element_bytes"), [("uint8", 1), ("bfloat16", 2), ("float16", 2), ("float32", 4)]
)
def test_planes_know_their_rows(dtype: str, element_bytes: int) -> None:
    """The axes after `page token` are the row; the axes before them repeat the plane."""
    k, v = GQA.bind(dtype=dtype, **SIZES).planes
    assert ("k", "v") == (k.name, v.name)
    assert ((2, 64), (2, 48)) == (k.row_shape, v.row_shape)
    assert (3, 3) == (k.layer_count, v.layer_count)
    assert (128 * element_bytes, 96 * element_bytes) == (k.row_bytes, v.row_bytes)


def test_a_plane_may_have_neither_layers_nor_row_axes() -> None:
    """One scale for each token, in one layer, is a row of one element."""
    (plane,) = Layout("scales", Plane("scale", "page token")).bind(dtype="float32", token=8).planes
    assert (1, (), 4) == (plane.layer_count, plane.row_shape, plane.row_bytes)


@pytest.mark.parametrize(
    ("axes", "what"),
    [
        ("layer token head", "must name 'page' or 'request'"),
        ("layer", "must name 'page' or 'request'"),
        ("", "must name 'page' or 'request'"),
        ("layer page token request", "must name 'page' or 'request'"),
        ("layer token page head", "'token' outside of a page"),
        ("layer page token 0", "an axis without elements"),
        ("layer page token 00 head", "an axis without elements"),
        ("layer request token", "'token' outside of a page"),
    ],
)
def test_axes_that_make_no_rows_are_refused(axes: str, what: str) -> None:
    """A row belongs to a token, a page or a request."""
    with pytest.raises(LayoutError, match=f"plane 'k': .*{what}"):
        Layout("odd", Plane("k", axes))


def test_an_axis_named_twice_is_refused() -> None:
    """The axis could have two sizes."""
    with pytest.raises(LayoutError, match=r"\['head'\] twice"):
        Layout("odd", Plane("k", "layer page token head head"))


@pytest.mark.parametrize("names", [(), ("k", "k"), ("k", "v", "k")])
def test_planes_need_distinct_names(names: tuple[str, ...]) -> None:
    """A layout has at least one plane, and their names differ."""
    with pytest.raises(LayoutError, match="distinct, at least 1"):
        Layout("odd", *(Plane(name, "layer page token head") for name in names))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({**SIZES, "head": 0}, "head=0"),
        ({**SIZES, "token": -4}, "token=-4"),
        ({**SIZES, "window": 3}, "window"),
        ({**SIZES, "page": 3}, "page"),
        ({name: size for name, size in SIZES.items() if name != "v_head_dim"}, "v_head_dim"),
        ({}, "head_dim"),
    ],
)
def test_sizes_must_fit_the_axes(sizes: dict[str, int], named: str) -> None:
    """An axis without a size, a size without an axis, and a size below 1 are named."""
    with pytest.raises(LayoutError, match=named):
        GQA.bind(dtype="float32", **sizes)


@pytest.mark.parametrize("changes", [{"head": 2**62}, {"head": 2**40, "layer": 2**40}])
def test_more_bytes_than_64_bits_can_count_are_refused(changes: dict[str, int]) -> None:
    """Later they would overflow without an error."""
    with pytest.raises(LayoutError, match="have more than 9223372036854775807 bytes"):
        GQA.bind(dtype="float32", **{**SIZES, **changes})


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    """The message lists the valid dtypes."""
    with pytest.raises(LayoutError, match=r"'float64'.*'bfloat16'"):
        GQA.bind(dtype="float64", **SIZES)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"layer": 3},
        {"head": 2},
        {"head_dim": 7},
        {"v_head_dim": 4},
        {"head_dim": 3, "v_head_dim": 6},
        {"first_layer": 1},
        {"rank": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_fingerprints_tell_geometries_apart(changes: dict[str, Any]) -> None:
    """Each size, the dtype, the stage and the rank count."""
    assert small_geometry().fingerprint != small_geometry(**changes).fingerprint


def test_fingerprints_tell_layouts_apart() -> None:
    """Planes' names, axes and order count; the layout's name doesn't."""
    k, v = Plane("k", "layer page token head"), Plane("v", "layer page token head")
    layouts = [
        Layout("a", k, v),
        Layout("a", v, k),
        Layout("a", k),
        Layout("a", k, Plane("v", "page token head layer")),
        Layout("a", k, Plane("w", "layer page token head")),
    ]
    prints = {x.bind(dtype="uint8", layer=2, token=4, head=3).fingerprint for x in layouts}
    assert len(layouts) == len(prints)
    sizes: dict[str, Any] = {"dtype": "uint8", "layer": 2, "token": 4, "head": 3}
    assert Layout("b", k, v).bind(**sizes).fingerprint == layouts[0].bind(**sizes).fingerprint


def test_the_fingerprint_is_the_same_everywhere() -> None:
    """It depends on no process, no order of arguments and no page size; its bytes are a format."""
    fingerprint = small_geometry().fingerprint
    shuffled = GQA.bind(v_head_dim=3, head_dim=6, head=1, token=64, layer=2, dtype="bfloat16")
    assert fingerprint == shuffled.fingerprint
    assert "e48a06c9dedbbecb88d6db7ecd77301d" == fingerprint.hex()


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
@pytest.mark.parametrize("name", ["token", "layer", "head", "first_layer", "rank"])
def test_an_invalid_size_binds_nothing(name: str, value: Any) -> None:
    """True would give another fingerprint than 1. A list may give the layers' numbers."""
    if name in ("layer", "head") and isinstance(value, list | tuple):
        value = [*value, 0.5]
    sizes = {"token": 4, "layer": 2, "head": 1, "head_dim": 6, "v_head_dim": 3}
    with pytest.raises(LayoutError, match=name):
        GQA.bind(dtype="bfloat16", **{**sizes, name: value})


@pytest.mark.parametrize("unit", ONES, ids=name_of)
def test_numpy_and_torch_integers_bind_the_same(unit: Any) -> None:
    """The fingerprint is the same, or a snapshot of one process would miss in another."""
    names = ("token", "layer", "head", "head_dim", "v_head_dim", "first_layer", "rank")
    expected = GQA.bind(dtype="bfloat16", **dict.fromkeys(names, 1))
    assert expected == GQA.bind(dtype="bfloat16", **dict.fromkeys(names, unit))
    assert (
        expected.fingerprint == GQA.bind(dtype="bfloat16", **dict.fromkeys(names, unit)).fingerprint
    )
