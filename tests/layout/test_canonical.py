"""The canonical form of geometries: its content, its reading, and differences of two forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.conformance import SAMPLES, Sample
from kvtide.errors import LayoutError
from kvtide.layout import (
    FORM_VERSION,
    GQA,
    Counts,
    EveryNth,
    EveryToken,
    Geometry,
    Layout,
    Mapped,
    Maps,
    OfRequest,
    Plane,
    Rows,
    Rule,
    Striped,
    canonical_json,
    differences,
    fingerprint_of,
)
from kvtide.layout.compressed import COMPRESSED_4
from kvtide.layout.gqa import GQA_HND
from kvtide.layout.mla import DSA, MLA_NZ
from kvtide.layout.recurrent import RECURRENT_AND_FULL
from kvtide.layout.window import WINDOW, WINDOW_AND_FULL
from support.values import NO_ROWS, name_of

FORMS = Path(__file__).parent / "geometry_forms"
HEADS: dict[str, Any] = {"layer": 2, "head": 4, "head_dim": 8, "v_head_dim": 6}


def gqa(**changes: Any) -> Geometry:
    """Binds keys of 4 heads of 8 and values of 4 heads of 6, in two layers."""
    sizes: dict[str, Any] = {"dtype": "bfloat16", "token": 16, **HEADS, **changes}
    return GQA.bind(**sizes)


def form_of(geometry: Geometry) -> Any:
    """Returns the geometry's form as a reader gets it: a copy, from its text."""
    return json.loads(geometry.canonical)


# ---- golden forms ---------------------------------------------------------------------------

GOLDEN: dict[str, tuple[Geometry, str]] = {
    "gqa": (gqa(), "addf470e41ba2381a3a0502ac0bdd50d"),
    "dsa_with_index": (
        DSA.bind(
            dtype="bfloat16", token=64, first_layer=8, rank=3, layer=4, latent_dim=576,
            index_layer=(0, 3), index_page_bytes=8448,
        ),
        "8adad370f5114e5cf458be48236cbf02",
    ),
    "mla_nz": (
        MLA_NZ.bind(dtype="bfloat16", token=128, layer=2, latent_tile=32, rope_tile=4),
        "b7f695d2ced5e86310302455acf350eb",
    ),
    "window_and_full": (
        WINDOW_AND_FULL.bind(
            dtype="float8_e4m3fn", token=1,
            **{f"full_{axis}": size for axis, size in HEADS.items()},
            **{f"window_{axis}": size for axis, size in HEADS.items()},
        ),
        "127a065f9a8b2e60ce916744837986b1",
    ),
    "recurrent_and_full": (
        RECURRENT_AND_FULL.bind(
            dtype="bfloat16", **{f"full_{axis}": size for axis, size in HEADS.items()},
            state_layer=6, state_channel=12, state_width=4, state_head=2, state_head_dim=8,
            state_state=16,
        ),
        "937b72fb4bc8127427c9122b31dded92",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_form_of_a_geometry_equals_the_committed_one(name: str) -> None:
    """Snapshots with these forms may be on disks. Never change a committed form.

    A new form needs a new version with its own files, and the old forms must still be read.
    """
    geometry, fingerprint = GOLDEN[name]
    committed = (FORMS / f"{name}.json").read_text(encoding="ascii")
    assert committed == geometry.canonical + "\n"
    assert fingerprint == geometry.fingerprint.hex()
    assert geometry.canonical == Geometry.from_dict(json.loads(committed)).canonical


def test_a_fingerprint_depends_only_on_the_text() -> None:
    """It is BLAKE2b of 16 bytes, which any language can compute from the text."""
    assert "cae66941d9efbd404e4d88758ea67670" == fingerprint_of("").hex()
    assert gqa().fingerprint == fingerprint_of(gqa().canonical)


def test_canonical_json_is_one_text_for_each_value() -> None:
    """Keys are sorted, there are no spaces, and characters outside of ASCII are escaped."""
    assert '{"a":[1,"\\u00fc"],"b":null}' == canonical_json({"b": None, "a": [1, "ü"]})
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


# ---- what is content, and what is not -------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draws all declared layouts, in sizes other than the samples'."""
    sample: Sample = draw(st.sampled_from(SAMPLES))
    sizes = {
        axis: size + draw(st.integers(0, 3)) if isinstance(size, int) else size
        for axis, size in sample.sizes.items()
    }
    sample = replace(sample, sizes=sizes, first_layer=draw(st.integers(0, 99)))
    return replace(sample.bind(page_size=draw(st.integers(1, 40))), rank=draw(st.integers(0, 9)))


@given(geometries())
def test_a_geometry_that_was_read_owns_the_same_bytes(geometry: Geometry) -> None:
    """The planes are equal for every layout, and the geometry compares as equal."""
    read = Geometry.from_dict(form_of(geometry))
    for plane, other in zip(geometry.planes, read.planes, strict=True):
        assert (plane.name, plane.dtype, plane.unit) == (other.name, other.dtype, other.unit)
        assert (plane.layers, plane.row) == (other.layers, other.row)
        assert [rule.content() for rule in plane.rules] == [rule.content() for rule in other.rules]
        assert (plane.size_bytes, plane.tokens_per_row) == (other.size_bytes, other.tokens_per_row)
    assert (geometry.first_layer, geometry.rank) == (read.first_layer, read.rank)
    assert (geometry.groups, geometry.fingerprint) == (read.groups, read.fingerprint)
    assert [] == differences(geometry.to_dict(), read.to_dict())


def test_a_count_of_layers_means_the_first_layers() -> None:
    """A count and the numbers of the first layers mean the same bytes; other numbers don't."""
    assert gqa(layer=4).fingerprint == gqa(layer=(0, 1, 2, 3)).fingerprint
    others = [gqa(layer=layers).fingerprint for layers in (4, (1, 2, 3, 4), (0, 1, 3, 2), 5)]
    assert 4 == len(set(others))


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"head": 1}, True),
        ({"token": 1}, True),
        ({"head": 1, "token": 1}, True),
        ({"head": 2}, False),
    ],
)
def test_heads_first_equals_tokens_first_if_a_tokens_bytes_are_together(
    changes: dict[str, Any], is_same: bool
) -> None:
    """With one head, or one token in a page, the order of these axes doesn't matter."""
    sizes: dict[str, Any] = {"dtype": "bfloat16", "token": 16, **HEADS, **changes}
    nhd, hnd = GQA.bind(**sizes), GQA_HND.bind(**sizes)
    assert is_same == (nhd.canonical == hnd.canonical)
    assert is_same == ([plane.row_shape for plane in nhd.planes] == [
        plane.row_shape for plane in hnd.planes
    ])  # fmt: skip
    assert ["token" if is_same else "page"] * 2 == [plane.unit for plane in hnd.planes]


def test_settings_of_a_pool_are_no_content() -> None:
    """The layout's name, the page size of token rows, a map's hole and a rule without effect."""
    plain = Layout("plain", Plane("k", "layer page token 3", rows=(Mapped("window"),)))
    other = Layout(
        "other", Plane("k", "layer page token 3", rows=(EveryToken(), Mapped("window", hole=0)))
    )
    sizes: dict[str, Any] = {"dtype": "uint8", "layer": 2}
    assert plain.bind(**sizes, token=4).canonical == other.bind(**sizes, token=16).canonical


def test_rules_that_differ_only_in_settings_of_their_pool_are_refused() -> None:
    """A reader of the form would put the planes into one group, with the same rows."""
    layout = Layout(
        "holes",
        Plane("k", "layer page token 3", rows=(Mapped("window", hole=0),)),
        Plane("v", "layer page token 3", rows=(Mapped("window", hole=-1),)),
    )
    with pytest.raises(LayoutError, match=r"plane 'v': rules .*hole=-1.*hole=0.*make them equal"):
        layout.bind(dtype="uint8", layer=1)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_declaration_comes_back_complete(sample: Sample) -> None:
    """A map's hole belongs to the declaration, so it comes back, too."""
    text = canonical_json(sample.layout.to_dict())
    assert sample.layout == Layout.from_dict(json.loads(text))


@given(st.sampled_from(SAMPLES), st.integers(0, 200))
def test_a_declaration_with_a_wrong_key_is_refused(sample: Sample, place: int) -> None:
    """The error names the missing key and the unknown one."""
    form = json.loads(canonical_json(sample.layout.to_dict()))
    plane = form["planes"][place % len(form["planes"])]
    key = [*plane][place % len(plane)]
    plane[f"{key}s"] = plane.pop(key)
    with pytest.raises(LayoutError, match=f"missing are .*{key}.*not known are .*{key}s"):
        Layout.from_dict(form)


# ---- forms that somebody else wrote ---------------------------------------------------------

DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]

Change = Callable[[Any], Any]


def put(*path: Any, value: Any) -> Change:
    """Makes a change that sets the value at a path of a form."""

    def change(form: Any) -> None:
        for step in path[:-1]:
            form = form[step]
        form[path[-1]] = value

    change.__name__ = "-".join([*map(str, path), name_of(value)[:40]])
    return change


K = ("planes", 0)
HOSTILE: list[tuple[Change, str]] = [
    (put("version", value=2), "version 2, this kvtide reads version 1; use the kvtide that wrote"),
    (put("version", value=True), "version True"),
    (put("version", value="1"), "version '1'"),
    (put("first_layer", value=-1), "first_layer must be an integer from 0, not -1"),
    (put("rank", value=2**63), "rank must be"),
    (put("rank", value=True), "rank must be"),
    (put("name", value="gqa"), r"not known are \['name'\]"),
    (put("groups", value={}), "groups must be a list"),
    (put("groups", value=[[], []]), "isn't canonical"),
    (put("groups", value=[DEEP]), "a rule must be an object"),
    (put("groups", value=[[{"rule": "every_token"}]]), "isn't canonical: plane 'k': rows by"),
    (put("groups", value=[[{"rule": "elsewhere.pages"}]]), "rule 'elsewhere.pages' is unknown"),
    (put("groups", value=[[{"rule": ["every_nth"]}]]), r"rule \['every_nth'\] is unknown"),
    (put("groups", value=[[{"rule": "every_nth"}]]), r"missing are \['count'\]"),
    (put("groups", value=[[{"rule": "every_nth", "count": 4, "hole": 0}]]), r"are \['hole'\]"),
    (put("groups", value=[[{"rule": "every_nth", "count": -4}]]), "must be an integer from 1"),
    (put("groups", value=[[{"rule": "every_nth", "count": True}]]), "count must be"),
    (put("groups", value=[[{"rule": "every_nth", "count": 2**70}]]), "count must be"),
    (put("groups", value=[[{"rule": "mapped", "name": DEEP}]]), "name must be a string"),
    (put("groups", value=[[{"rule": "mapped", "name": 3}]]), "name must be a string"),
    (put("groups", value=[[{"rule": "mapped", "name": "w", "hole": 0}]]), "isn't canonical"),
    (put("groups", value=[[{"rule": "striped", "rank": 4, "world": 4, "run": 1}]]), "rank 4 isn't"),
    (put("groups", value=[[{"rule": "every_nth", "count": 2}] * 17]), "a list of 16 items at most"),
    (put("planes", value=[]), "must be distinct, at least 1"),
    (put("planes", value=DEEP), "a plane must be an object"),
    (put("planes", value="planes"), "planes must be a list"),
    (put(*K, value=None), "a plane must be an object"),
    (put(*K, "tokens", value=1), r"not known are \['tokens'\]"),
    (put(*K, "name", value="v"), "must be distinct"),
    (put(*K, "name", value=7), "a plane's name must be a string"),
    (put(*K, "dtype", value="float64"), "plane 'k': dtype 'float64' isn't one of"),
    (put(*K, "dtype", value=["bfloat16"]), r"plane 'k': dtype \['bfloat16'\] isn't one of"),
    (put(*K, "group", value=1), r"plane 'k': group 1 isn't in 0 … 0"),
    (put(*K, "group", value=-1), "plane 'k': group -1"),
    (put(*K, "group", value=False), "plane 'k': group False"),
    (put(*K, "unit", value="block"), "plane 'k': unit 'block' isn't one of"),
    (put(*K, "unit", value="page"), "isn't canonical: plane 'k': one row for each token here"),
    (put(*K, "unit", value="request"), "isn't canonical: plane 'k': rows by of_request"),
    (put(*K, "layers", value=DEEP), r"plane 'k': layers: an axis must be \[name, size\]"),
    (put(*K, "layers", value=[["layer", 0]]), "'layer' must be an integer from 1, .*not 0"),
    (put(*K, "layers", value=[["layer", [1, 1]]]), r"'layer' must be an integer from 1"),
    (put("planes", value=[{**k, "layers": [["layer", [0, 1]]]} for k in form_of(gqa())["planes"]]),
     r"isn't canonical: plane 'k': layer 2 here, \[0, 1\] there; plane 'v': layer 2 here"),
    (put(*K, "layers", value=[["layer", 3]]), "axis 'layer' is 2 here, 3 in another plane"),
    (put(*K, "layers", value=[["token", 2]]), r"names \['token'\] twice"),
    (put(*K, "row", 0, value=["head", True]), "'head' must be an integer from 1, .*not True"),
    (put(*K, "row", 0, value=["head", 2**63]), "'head' must be an integer from 1"),
    (put(*K, "row", 0, value=["head", 4.0]), "'head' must be an integer from 1"),
    (put(*K, "row", 0, value=["head", 4, 4]), r"an axis must be \[name, size\]"),
    (put(*K, "row", 0, value=["page", 4]), r"names \['page'\] twice"),
    (put(*K, "row", 0, value=["two words", 4]), "name can't be 'two words'"),
    (put(*K, "row", 0, value=["", 4]), "name can't be ''"),
    (put(*K, "row", 0, value=["x" * 1001, 4]), "name can't be"),
    (put(*K, "row", 0, value=["4", 5]), "isn't canonical: plane 'k': 4 4 here, 5 there"),
    (put(*K, "row", 0, value=["0", 0]), "'0' must be an integer from 1"),
    (put(*K, "row", 0, value=["9" * 999, 5]), "more than 9223372036854775807 bytes"),
    (put(*K, "row", value=[[f"a{n}", 2**60] for n in range(16)]), "more than 9223372036854775807"),
    (put(*K, "row", value=[[f"a{n}", 1] for n in range(17)]), "16 items at most, not of 17"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"), HOSTILE, ids=lambda each: getattr(each, "__name__", "")
)
def test_an_invalid_form_is_refused(change: Change, message: str) -> None:
    """The error says what is wrong; no other error is raised, and nothing of the form is used."""
    form = form_of(gqa())
    assert gqa().canonical == Geometry.from_dict(form).canonical
    change(form)
    with pytest.raises(LayoutError, match=message):
        Geometry.from_dict(form)


@pytest.mark.parametrize("key", ["version", "first_layer", "rank", "groups", "planes"])
def test_a_form_that_lacks_a_key_is_refused(key: str) -> None:
    """The error names the key."""
    form = form_of(gqa())
    del form[key]
    with pytest.raises(LayoutError, match=key):
        Geometry.from_dict(form)


@pytest.mark.parametrize("form", [*NO_ROWS, None, "{}", [], DEEP, {}, {1: 2}], ids=name_of)
def test_a_value_that_is_no_form_is_refused(form: Any) -> None:
    """The value may have any type."""
    with pytest.raises(LayoutError, match="version"):
        Geometry.from_dict(form)
    with pytest.raises(LayoutError, match=r"must be an object|missing"):
        Rule.from_dict(form)
    with pytest.raises(LayoutError, match=r"must be an object|missing"):
        Layout.from_dict(form)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def text_of(form: Any) -> str | None:
    """Returns a form's canonical JSON, or None for infinity, which JSON doesn't have."""
    try:
        return canonical_json(form)
    except ValueError:
        return None


@given(st.data(), geometries(), JSON)
def test_any_value_in_any_place_is_refused_or_read_unchanged(
    data: st.DataObject, geometry: Geometry, value: Any
) -> None:
    """A form is read unchanged or refused, and the differences of two can always be named."""
    form = place = form_of(geometry)
    while isinstance(place, dict | list) and place:
        step = data.draw(
            st.sampled_from([*(place if isinstance(place, dict) else range(len(place)))])
        )
        if not isinstance(place[step], dict | list) or data.draw(st.booleans()):
            place[step] = value
            break
        place = place[step]
    try:
        read = Geometry.from_dict(form)
    except LayoutError:
        assert text_of(form) != geometry.canonical
    else:
        assert text_of(form) == read.canonical
    lines = differences(geometry.to_dict(), form)
    assert (text_of(form) == geometry.canonical) == (lines == [])
    assert all(len(line) < 1000 for line in lines)


# ---- rules that kvtide doesn't have ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shifted(Rule):
    """A rule that kvtide doesn't have, with a field that only its pool needs."""

    form_name: ClassVar[str] = "test_canonical.shifted"
    local: ClassVar[Any] = {"width": 0}
    count: int
    width: int

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        return rows.only(rows.ids >= 0, rows.ids + self.count)

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return id_count + self.count

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1


def test_a_rule_is_known_once_it_is_defined() -> None:
    """The form name finds the rule; a reader gets stand-ins for fields that aren't content."""
    layout = Layout("shifted", Plane("k", "layer page token 3", rows=(Shifted(4, width=9),)))
    geometry = layout.bind(dtype="uint8", layer=1)
    (plane,) = Geometry.from_dict(form_of(geometry)).planes
    assert (Shifted(4, width=0),) == plane.rules
    assert {"rule": "test_canonical.shifted", "count": 4} == geometry.to_dict()["groups"][0][0]
    assert Shifted(4, width=9) == Rule.from_dict(Shifted(4, width=9).to_dict())


def test_a_rule_needs_a_unique_form_name() -> None:
    """Two rules with one name couldn't be told apart."""
    with pytest.raises(LayoutError, match="Nameless: give it a form_name"):
        type("Nameless", (Rule,), {})
    with pytest.raises(LayoutError, match="Other: its form_name 'mapped' is Mapped's already"):
        type("Other", (Rule,), {"form_name": "mapped"})
    assert Mapped("window") == Rule.from_dict({"rule": "mapped", "name": "window"})


def test_a_rule_with_other_fields_than_strings_and_integers_has_no_form() -> None:
    """Other values could be written in several ways."""
    rule = Shifted(4, width=[])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"width must be a string or an integer, not \[\]"):
        rule.to_dict()
    with pytest.raises(LayoutError, match="count must be a string or an integer, not True"):
        Rule.from_dict({"rule": "test_canonical.shifted", "count": True})


# ---- differences ----------------------------------------------------------------------------

WINDOWED: dict[str, Any] = {"dtype": "bfloat16", "token": 16, **HEADS}


@pytest.mark.parametrize(
    ("ours", "theirs", "lines"),
    [
        (gqa(), gqa(), []),
        (gqa(), gqa(token=64), []),
        (gqa(), gqa(head=8), [f"plane {name}: head 4 here, 8 there" for name in ("'k'", "'v'")]),
        (gqa(), gqa(v_head_dim=7), ["plane 'v': v_head_dim 6 here, 7 there"]),
        (gqa(), gqa(layer=(0, 3)),
         [f"plane {name}: layer 2 here, [0, 3] there" for name in ("'k'", "'v'")]),
        (gqa(), gqa(dtype={"k": "float16", "v": "bfloat16"}),
         ["plane 'k': dtype bfloat16 here, float16 there"]),
        (gqa(), gqa(first_layer=8, rank=3),
         ["first layer 0 here, 8 there", "rank 0 here, 3 there"]),
        (gqa(), GQA_HND.bind(dtype="bfloat16", token=16, **HEADS),
         [line for name, dim in (("'k'", "head_dim"), ("'v'", "v_head_dim")) for line in (
             f"plane {name}: one row for each token here, page there",
             f"plane {name}: axes of a row head {dim} here, head token {dim} there",
             f"plane {name}: rows by every_token() here, every_nth(count=16) there")]),
        (WINDOW.bind(**WINDOWED), WINDOW.through("shared", Striped(1, 4)).bind(**WINDOWED),
         [f"plane {name}: rows by mapped(name='full_to_window') here, mapped(name='full_to_window')"
          ", then striped(rank=1, world=4, run=1) there" for name in ("'k'", "'v'")]),
        (gqa(), DSA.bind(dtype="bfloat16", layer=2, latent_dim=8, index_layer=2,
                         index_page_bytes=3),
         ["plane 'k' only here", "plane 'v' only here", "plane 'kv' only there",
          "plane 'index_k' only there"]),
    ],
)  # fmt: skip
def test_differences_are_described_in_words(
    ours: Geometry, theirs: Geometry, lines: list[str]
) -> None:
    """Each line has the plane, the axis and both values, for a user whose snapshot doesn't fit."""
    assert lines == differences(ours.to_dict(), theirs.to_dict())


def test_another_version_and_another_order_are_differences_too() -> None:
    """A form of an unknown version can still be compared."""
    form = form_of(gqa())
    assert ["version 1 here, 2 there"] == differences(form, form | {"version": 2})
    turned = form | {"planes": form["planes"][::-1]}
    assert ["planes in the order ['k', 'v'] here, ['v', 'k'] there"] == differences(form, turned)
    more = form | {"comment": "it fits"}
    assert ["the forms differ in something that has no name here"] == differences(form, more)
    assert ["rank 0 here, False there"] == differences(form, form | {"rank": False})
    assert ["rank 0 here, 0.0 there"] == differences(form, form | {"rank": 0.0})
    assert differences(form, DEEP)
    assert ["rank 0 here, [[[[[[[...]]]]]]] there"] == differences(form, form | {"rank": DEEP})
    assert 1 == FORM_VERSION


def test_the_unit_of_a_row_is_content() -> None:
    """The form says what a row stands for, whatever the layout calls it."""
    sizes: dict[str, Any] = {
        "dtype": "bfloat16",
        "token": 8,
        "layer": 1,
        "latent_dim": 4,
        "ring": 4,
    }
    geometry = COMPRESSED_4.bind(**sizes)
    assert [(EveryNth(4),), (OfRequest(),)] == [plane.rules for plane in geometry.planes]
    assert [[{"rule": "every_nth", "count": 4}], [{"rule": "of_request", "kind": "request"}]] == (
        geometry.to_dict()["groups"]
    )
    assert (0, 1) == geometry.groups
