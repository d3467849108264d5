"""The form is compared with a plain reading of it, byte by byte."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.form import (
    SPAN_BYTES,
    Section,
    chunk_sizes,
    chunk_tokens_for,
    sections_of,
)
from kvtide.layout import EveryNth, EveryToken, Geometry, Layout, Mapped, Plane
from support.pools import small_geometry

Byte = tuple[int, int, int, int]
"""A byte: (plane, layer, row of the request, byte of the row)."""
RULES = ((EveryToken(),), (EveryNth(1),), (Mapped("window"),))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draws up to four planes in up to three groups, with rows of odd and even bytes."""
    planes, sizes = [], {}
    for number in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from((1, 2, 3, 5, 6, 8, 12, 17, 24)))
        rules = draw(st.sampled_from(RULES))
        planes.append(Plane(f"p{number}", f"layer{number} page token {width}", rows=rules))
        sizes[f"layer{number}"] = draw(st.integers(1, 4))
    return Layout("some", *planes).bind(dtype="uint8", **sizes)


def chunks_of(geometry: Geometry, sections: list[Section], rows: list[int]) -> list[list[Byte]]:
    """Lists the bytes of each chunk in order, which it finds one by one from each section."""
    chunks: list[list[Byte]] = []
    for section in sections:
        ids = section.split(np.array(rows, np.int64)).tolist()
        for first in range(0, len(ids), section.chunk_rows):
            chunk: list[Byte] = []
            some = ids[first : first + section.chunk_rows]
            for plane, layers, width in zip(
                section.planes, section.layers, section.widths, strict=True
            ):
                whole = geometry.planes[plane].row_bytes
                chunk += [
                    (plane, layer, *divmod(row * width + byte, whole))
                    for layer in layers
                    for row in some
                    for byte in range(width)
                ]
            chunks.append(chunk)
    return chunks


@given(geometries(), st.integers(1, 200), st.permutations(range(6)), st.integers(0, 6))
def test_every_byte_is_in_exactly_one_chunk(
    geometry: Geometry, chunk_bytes: int, rows: list[int], count: int
) -> None:
    """Every byte of every row is in a chunk, and each chunk has the length that the form states."""
    sections = sections_of(geometry, chunk_bytes)
    chunks = chunks_of(geometry, sections, rows[:count])
    expected = Counter(
        (number, layer, row, byte)
        for number, plane in enumerate(geometry.planes)
        for layer in range(plane.layer_count)
        for row in rows[:count]
        for byte in range(plane.row_bytes)
    )
    assert expected == Counter(byte for chunk in chunks for byte in chunk)
    counts = [count] * len(geometry.planes)
    assert [len(chunk) for chunk in chunks] == [*chunk_sizes(sections, counts)]


@given(geometries(), st.integers(1, 200))
def test_no_chunk_is_larger_than_chunk_bytes(geometry: Geometry, chunk_bytes: int) -> None:
    """A larger row is split, and each chunk states its length."""
    sections = sections_of(geometry, chunk_bytes)
    assert all(0 < section.chunk_bytes <= chunk_bytes for section in sections)
    chunks = chunks_of(geometry, sections, [*range(6)])
    assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
    assert len(chunks) == sum(section.chunk_count(6) for section in sections)


@given(geometries(), st.integers(1, 200))
def test_rows_and_their_parts_are_in_order(geometry: Geometry, chunk_bytes: int) -> None:
    """In each layer a snapshot has rows in the request's order, and bytes in the row's order."""
    rows = [*range(6)][::-1]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for chunk in chunks_of(geometry, sections_of(geometry, chunk_bytes), rows):
        for number, layer, row, byte in chunk:
            seen.setdefault((number, layer), []).append((row, byte))
    for (number, _), found in seen.items():
        size = geometry.planes[number].row_bytes
        assert [(row, byte) for row in rows for byte in range(size)] == found


@given(geometries(), st.integers(1, 200))
def test_groups_do_not_mix(geometry: Geometry, chunk_bytes: int) -> None:
    """Planes with different row rules are never in one section."""
    groups = geometry.groups
    for plane, group in zip(geometry.planes, groups, strict=True):
        assert plane.rules == geometry.planes[groups.index(group)].rules
    for section in sections_of(geometry, chunk_bytes):
        assert {section.group} == {groups[plane] for plane in section.planes}


@given(geometries(), st.sampled_from((1, 40, 200, 1 << 20, 3 << 20)), st.integers(1, 1 << 20))
def test_spans_cover_a_chunk_layer_by_layer(
    geometry: Geometry, chunk_bytes: int, rows: int
) -> None:
    """Every span but the last has at least SPAN_BYTES, and less without its last layer."""
    for section in sections_of(geometry, chunk_bytes):
        held = min(rows, section.chunk_rows)
        layers = [
            held * width
            for width, some in zip(section.widths, section.layers, strict=True)
            for _ in some
        ]
        ends = np.cumsum(layers).tolist()
        stops = section.span_stops(held)
        assert stops[-1] == ends[-1]
        assert set(stops) <= set(ends)
        for first, stop in pairwise((0, *stops)):
            assert stop - first >= SPAN_BYTES or stop == ends[-1]
            before = [end for end in ends if end < stop]
            assert not before or before[-1] - first < SPAN_BYTES


@pytest.mark.parametrize(
    ("layer_bytes", "rows", "stops"),
    [
        ([1 << 10] * 4, 512, [512 << 10, 1024 << 10, 1536 << 10, 2048 << 10]),
        ([1 << 10] * 4, 511, [1022 << 10, 2044 << 10]),
        ([3 << 20], 1, [3 << 20]),
        ([1 << 10] * 3, 1, [3 << 10]),
        ([350 << 10] * 3, 1, [700 << 10, 1050 << 10]),
    ],
)
def test_a_span_ends_with_the_layer_that_fills_it(
    layer_bytes: list[int], rows: int, stops: list[int]
) -> None:
    """A span also ends with its chunk."""
    layers = (range(len(layer_bytes)),)
    section = Section(0, (0,), layers, (layer_bytes[0],), 1, 1 << 20)
    assert stops == [*section.span_stops(rows)]


@pytest.mark.parametrize(
    ("row_bytes", "chunk_bytes", "rows"),
    [
        (1152, 227 * 1152, 192), (1152, 64 * 1152, 64), (1152, 63 * 1152, 32), (4096, 3 * 4096, 2),
        (8191, 3 * 8191, 2), (8192, 3 * 8192, 3), (8192, 100 * 8192, 100),
    ],
)  # fmt: skip
def test_a_chunk_has_an_even_number_of_narrow_rows(
    row_bytes: int, chunk_bytes: int, rows: int
) -> None:
    """The number of rows is a multiple of 64 or a power of two; of wide rows all fit that can."""
    layout = Layout("one", Plane("k", f"layer page token {row_bytes}"))
    (section,) = sections_of(layout.bind(dtype="uint8", layer=1), chunk_bytes)
    assert (rows, 1) == (section.chunk_rows, section.row_parts)


def test_the_widest_row_says_whether_rows_are_narrow() -> None:
    """The widest row has the most bytes, so it decides."""
    layout = Layout("two", Plane("k", "layer page token 16"), Plane("v", "layer page token 8192"))
    (section,) = sections_of(layout.bind(dtype="uint8", layer=1), 3 * (16 + 8192))
    assert 3 == section.chunk_rows


@pytest.mark.parametrize(
    ("chunk_bytes", "expected"),
    [
        (36, 1), (71, 1), (72, 2), (143, 2), (144, 4), (36 * 64 - 1, 32), (36 * 64, 64),
        (36 * 128 - 1, 64), (36 * 192, 192), (1 << 20, 29120),
    ],
)  # fmt: skip
def test_a_chunk_holds_an_even_number_of_tokens(chunk_bytes: int, expected: int) -> None:
    """A token has 36 bytes; a chunk holds a multiple of 64 tokens, or the largest power of two."""
    assert expected == chunk_tokens_for(small_geometry(), chunk_bytes)


@pytest.mark.parametrize(("chunk_bytes", "layers"), [(10, [2]), (9, [1, 1])])
def test_layers_that_fill_a_chunk_to_the_byte_are_one_section(
    chunk_bytes: int, layers: list[int]
) -> None:
    """Two layers of five bytes fit in ten bytes; with nine each layer has its own section."""
    geometry = Layout("two", Plane("k", "layer page token 5")).bind(dtype="uint8", layer=2)
    sections = sections_of(geometry, chunk_bytes)
    assert layers == [len(section.layers[0]) for section in sections]


def test_a_token_may_have_a_single_byte() -> None:
    """A chunk then holds as many tokens as bytes."""
    geometry = Layout("one", Plane("k", "layer page token 1")).bind(dtype="uint8", layer=1)
    assert 128 == chunk_tokens_for(geometry, 128)


def test_a_chunk_holds_at_least_one_token() -> None:
    """A token that is larger than a chunk still counts as one."""
    assert 1 == chunk_tokens_for(small_geometry(), 35)
