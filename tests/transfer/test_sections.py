"""Sections against a naive reading: byte by byte, what is in which chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.conformance.samples import SAMPLES, Sample
from kvtide.conformance.subjects import KINDS
from kvtide.device import CPUDevice
from kvtide.errors import LayoutError
from kvtide.layout import BufferRows
from kvtide.transfer.plan import Section, sections_of

Byte = tuple[int, int, int, int]
"""(buffer, layer, row of the request, byte of the row)."""


@dataclass(frozen=True)
class Pool:
    """Buffers with layers, each layer of `row_count` rows."""

    buffers: tuple[BufferRows, ...]
    row_count: int


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Up to four buffers in up to three groups, with rows of odd and even bytes."""
    row_count = draw(st.integers(1, 6))
    buffers = [
        BufferRows(
            draw(st.sampled_from((1, 2, 3, 5, 6, 8, 12, 17, 24))),
            np.arange(draw(st.integers(1, 4)), dtype=np.int64) * row_count,
            draw(st.integers(0, 2)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return Pool(tuple(buffers), row_count)


def chunks_of(pool: Pool, sections: list[Section], rows: list[int]) -> list[list[Byte]]:
    """The bytes of each chunk in order, found one by one from what a section says."""
    chunks: list[list[Byte]] = []
    for section in sections:
        ids = section.ids(np.array(rows, np.int64)).tolist()
        for first in range(0, len(ids), section.chunk_rows):
            chunk: list[Byte] = []
            for number, part in zip(section.buffers, section.rows, strict=True):
                for start in part.layer_rows.tolist():
                    for row in ids[first : first + section.chunk_rows]:
                        at = (start + row) * part.row_bytes
                        chunk += [_byte(pool, number, at + n) for n in range(part.row_bytes)]
            chunks.append(chunk)
    return chunks


def _byte(pool: Pool, number: int, offset: int) -> Byte:
    """Which byte lies at that offset of a buffer whose layers lie one after the other."""
    size = pool.buffers[number].row_bytes
    row, byte = divmod(offset, size)
    layer, row = divmod(row, pool.row_count)
    return number, layer, row, byte


@given(pools(), st.integers(1, 200), st.data())
def test_every_byte_is_in_exactly_one_chunk(
    pool: Pool, chunk_bytes: int, data: st.DataObject
) -> None:
    """Of every row of every layer, and no other byte."""
    rows = data.draw(st.permutations(range(pool.row_count)).map(list))
    rows = rows[: data.draw(st.integers(0, pool.row_count))]
    chunks = chunks_of(pool, sections_of(pool.buffers, chunk_bytes), rows)
    expected = Counter(
        (number, layer, row, byte)
        for number, buffer in enumerate(pool.buffers)
        for layer in range(len(buffer.layer_rows))
        for row in rows
        for byte in range(buffer.row_bytes)
    )
    assert expected == Counter(byte for chunk in chunks for byte in chunk)


@given(pools(), st.integers(1, 200))
def test_no_chunk_is_larger_than_asked_for(pool: Pool, chunk_bytes: int) -> None:
    """A row that is larger is cut in pieces, and each chunk says how large it is."""
    sections = sections_of(pool.buffers, chunk_bytes)
    assert all(0 < section.chunk_bytes <= chunk_bytes for section in sections)
    rows = [*range(pool.row_count)]
    chunks = chunks_of(pool, sections, rows)
    assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)
    assert len(chunks) == sum(section.chunk_count(len(rows)) for section in sections)


@given(pools(), st.integers(1, 200))
def test_pieces_of_a_row_lie_in_order(pool: Pool, chunk_bytes: int) -> None:
    """Layer by layer a snapshot has rows in the request's order, and their bytes in the row's."""
    rows = [*range(pool.row_count)][::-1]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for chunk in chunks_of(pool, sections_of(pool.buffers, chunk_bytes), rows):
        for number, layer, row, byte in chunk:
            seen.setdefault((number, layer), []).append((row, byte))
    for (number, _), found in seen.items():
        size = pool.buffers[number].row_bytes
        assert [(row, byte) for row in rows for byte in range(size)] == found


@given(pools(), st.integers(1, 200))
def test_groups_do_not_mix(pool: Pool, chunk_bytes: int) -> None:
    """Planes whose rows are named differently are never in one section."""
    for section in sections_of(pool.buffers, chunk_bytes):
        assert {section.group} == {pool.buffers[number].group for number in section.buffers}
        assert {section.group} == {rows.group for rows in section.rows}


@given(pools(), st.integers(1, 200), st.data())
def test_sections_do_not_depend_on_how_layers_lie(
    pool: Pool, chunk_bytes: int, data: st.DataObject
) -> None:
    """One buffer for all layers, or one for each: the same bytes in the same chunks."""
    split = [
        BufferRows(buffer.row_bytes, np.zeros(1, np.int64), buffer.group)
        for buffer in pool.buffers
        for _ in buffer.layer_rows
    ]
    shapes = [
        [
            (s.group, s.pieces, s.chunk_rows, s.row_bytes, [
                one.row_bytes for one in s.rows for _ in one.layer_rows
            ])
            for s in sections_of(buffers, chunk_bytes)
        ]
        for buffers in (pool.buffers, split)
    ]  # fmt: skip
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_created_and_adopted_pools_have_the_same_sections(
    device: CPUDevice, sample: Sample
) -> None:
    """So a snapshot of one fits the other, at every size of chunks; gaps cut nothing."""
    for chunk_bytes in (1 << 20, 640, 401):
        found = []
        for kind in KINDS:
            pool = KINDS[kind](sample, device).pool
            found.append([
                (s.group, s.pieces, s.chunk_rows, s.row_bytes)
                for s in sections_of(pool.buffer_rows, chunk_bytes)
            ])  # fmt: skip
        assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("row_bytes", "chunk_bytes", "rows"),
    [
        (1152, 227 * 1152, 192), (1152, 64 * 1152, 64), (1152, 63 * 1152, 32), (4096, 3 * 4096, 2),
        (8191, 3 * 8191, 2), (8192, 3 * 8192, 3), (8192, 100 * 8192, 100),
    ],
)  # fmt: skip
def test_a_chunk_is_of_whole_groups_where_rows_are_narrow(
    row_bytes: int, chunk_bytes: int, rows: int
) -> None:
    """Of 64 rows, or of a power of two; wide rows move one by one, so it holds all that fit."""
    (section,) = sections_of([BufferRows(row_bytes, np.zeros(1, np.int64))], chunk_bytes)
    assert (rows, 1) == (section.chunk_rows, section.pieces)


def test_the_widest_row_says_whether_rows_are_narrow() -> None:
    """Most bytes are its."""
    buffers = [BufferRows(size, np.zeros(1, np.int64)) for size in (16, 8192)]
    (section,) = sections_of(buffers, 3 * (16 + 8192))
    assert 3 == section.chunk_rows


def test_row_with_gaps_that_would_have_to_be_cut_is_refused() -> None:
    """Its pieces are no rows of the buffer; the message says what would do."""
    padded = BufferRows(12, np.zeros(1, np.int64), is_padded=True)
    with pytest.raises(LayoutError, match=r"12 bytes with gaps.*larger blocks"):
        sections_of([padded], 11)
    assert 1 == len(sections_of([padded], 12))
