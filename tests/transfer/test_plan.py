from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError
from kvtide.form import Section
from kvtide.layout import BufferRows, Ids
from kvtide.transfer.plan import (
    ChunkPlan,
    buffer_sets,
    plan_chunks,
    plan_in_parts,
)
from support.pools import Bytes, slot_lists


@dataclass(frozen=True)
class Buffers:
    """Buffers of random bytes over `slot_count` slots: one for all layers, or one for each."""

    slot_count: int
    rows: tuple[BufferRows, ...]
    data: tuple[Bytes, ...]

    def blank(self) -> tuple[Bytes, ...]:
        """Makes buffers of the same sizes, full of poison."""
        return tuple(np.full_like(data, 0xA5) for data in self.data)


@st.composite
def buffers(draw: st.DrawFn, slot_count: int) -> Buffers:
    """Draws one to three planes; each is one buffer (layers at any distance) or one per layer."""
    rows: list[BufferRows] = []
    for plane in range(draw(st.integers(1, 3))):
        row_bytes = draw(st.sampled_from((1, 2, 3, 5, 8, 16)))
        layer_count = draw(st.integers(1, 3))
        if draw(st.booleans()):
            gap, lead = draw(st.integers(0, 5)), draw(st.integers(0, 3))
            starts = lead + np.arange(layer_count, dtype=np.int64) * (slot_count + gap)
            rows.append(BufferRows(row_bytes, starts, plane))
        else:
            rows += [BufferRows(row_bytes, np.zeros(1, np.int64), plane)] * layer_count
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [(int(row.layer_rows[-1]) + slot_count) * row.row_bytes for row in rows]
    data = tuple(rng.integers(0, 256, size, np.uint8) for size in sizes)
    return Buffers(slot_count, tuple(rows), data)


def section_of(rows: Sequence[BufferRows], chunk_rows: int) -> Section:
    """Makes a section of all layers of these buffers, with chunks of `chunk_rows` rows."""
    planes = sorted({buffer.plane for buffer in rows})
    counts = [sum(len(b.layer_rows) for b in rows if b.plane == plane) for plane in planes]
    widths = [next(b.row_bytes for b in rows if b.plane == plane) for plane in planes]
    return Section(0, tuple(planes), tuple(map(range, counts)), tuple(widths), 1, chunk_rows)


def plan_of(
    rows: Sequence[BufferRows], slots: Any, chunk_rows: int, call_bytes: int = 1 << 20
) -> list[ChunkPlan]:
    """Plans these slots, in tasks as small as spans allow."""
    section, ids = section_of(rows, chunk_rows), np.array(slots, np.int64)
    return plan_chunks(section, buffer_sets(section, rows), ids, 0, call_bytes, 1)


@dataclass(frozen=True)
class Case:
    """Buffers and slots to plan."""

    buffers: Buffers
    slots: list[int]
    chunk_tokens: int
    call_bytes: int

    def plan(self) -> list[ChunkPlan]:
        """Plans the case."""
        return plan_of(self.buffers.rows, self.slots, self.chunk_tokens, self.call_bytes)

    def chunks(self) -> list[list[int]]:
        """Returns the slots of each chunk."""
        size = self.chunk_tokens
        return [self.slots[first : first + size] for first in range(0, len(self.slots), size)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws buffers and slots of all styles, around the ends of chunks."""
    page_size = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    page_count = draw(st.integers(1, 8))
    slot_count = page_size * page_count
    chunk_tokens = draw(st.integers(1, 9) | st.sampled_from((16, 32, 64)))
    near = st.integers(-1, 1).map(lambda off: max(0, min(slot_count, chunk_tokens + off)))
    count = draw(st.integers(0, slot_count) | near)
    return Case(
        draw(buffers(slot_count)),
        draw(slot_lists(slot_count, page_size, count)),
        chunk_tokens,
        draw(st.sampled_from((1, 7, 16, 64, 100, 1 << 20))),
    )


def naive_gather(case: Case) -> list[bytes]:
    """Gathers each chunk row by row."""
    return [
        b"".join(
            data[(first + slot) * rows.row_bytes :][: rows.row_bytes].tobytes()
            for rows, data in zip(case.buffers.rows, case.buffers.data, strict=True)
            for first in rows.layer_rows.tolist()
            for slot in chunk
        )
        for chunk in case.chunks()
    ]


def naive_scatter(case: Case, chunks: Sequence[bytes], target: tuple[Bytes, ...]) -> None:
    """Scatters each chunk row by row."""
    for chunk, slots in zip(chunks, case.chunks(), strict=True):
        first_byte = 0
        for rows, data in zip(case.buffers.rows, target, strict=True):
            for first in rows.layer_rows.tolist():
                for slot in slots:
                    row = np.frombuffer(chunk[first_byte : first_byte + rows.row_bytes], np.uint8)
                    data[(first + slot) * rows.row_bytes :][: rows.row_bytes] = row
                    first_byte += rows.row_bytes


def calls_of(
    plan: ChunkPlan, number: int, data: Sequence[Bytes]
) -> Iterator[tuple[int, Bytes, Ids]]:
    """Lists all copies of a chunk: where each begins, the buffer as units, and their numbers.

    The buffer is a view, uint8 [unit, byte].
    """
    _, buffer_plans, tasks = plan
    for which, buffers, units, stop in (call for _, calls in tasks for call in calls):
        found = buffer_plans[which]
        index = found.units[number][units or slice(None)]
        first = stop - len(buffers) * index.size * found.unit_bytes
        for buffer in buffers:
            rest = data[found.buffer_set.numbers[buffer]][found.skip_bytes :]
            size = rest.size // found.unit_bytes * found.unit_bytes
            yield first, rest[:size].reshape(-1, found.unit_bytes), index
            first += index.size * found.unit_bytes


def chunk_count(plan: ChunkPlan) -> int:
    """Returns how many chunks a plan has."""
    return len(plan[1][0].units)


def planned_gather(case: Case) -> list[bytes]:
    """Gathers each chunk by the plan; asserts that its calls and its spans tile it."""
    token_bytes = sum(rows.row_bytes * len(rows.layer_rows) for rows in case.buffers.rows)
    sizes = [len(chunk) * token_bytes for chunk in case.chunks()]
    found: list[bytes] = []
    for plan in case.plan():
        assert len(found) == plan[0]
        for number in range(chunk_count(plan)):
            chunk = bytearray(sizes[len(found)])
            covered = np.zeros(len(chunk), int)
            for first, units, index in calls_of(plan, number, case.buffers.data):
                part = units[index].tobytes()
                chunk[first : first + len(part)] = part
                covered[first : first + len(part)] += 1
            assert len(chunk) == sizes[len(found)], "nothing beyond the chunk"
            assert (covered == 1).all(), "no gap, no overlap"
            spans = [span for task_spans, _ in plan[2] for span in task_spans]
            ends = [0, *(stop for _, stop in spans)]
            assert [*pairwise(ends)] == spans
            assert len(chunk) == ends[-1]
            found.append(bytes(chunk))
    return found


@given(cases())
def test_gathering_by_the_plan_equals_gathering_row_by_row(case: Case) -> None:
    """The order (plane, layer, token) depends only on the geometry and on the slots' order."""
    assert naive_gather(case) == planned_gather(case)


@given(cases())
def test_scattering_by_the_plan_equals_scattering_row_by_row(case: Case) -> None:
    """No other byte is written."""
    chunks = naive_gather(case)
    expected, actual = case.buffers.blank(), case.buffers.blank()
    naive_scatter(case, chunks, expected)
    numbered = iter(chunks)
    for plan in case.plan():
        for number in range(chunk_count(plan)):
            chunk = np.frombuffer(next(numbered), np.uint8)
            for first, units, index in calls_of(plan, number, actual):
                size = index.size * units.shape[1]
                units[index] = chunk[first : first + size].reshape(index.size, -1)
    assert all(np.array_equal(a, b) for a, b in zip(expected, actual, strict=True))


@given(cases(), st.data())
def test_source_and_target_may_have_other_slots(case: Case, data: st.DataObject) -> None:
    """A chunk holds as many bytes in the same order, wherever its tokens are."""
    other_slots = data.draw(st.permutations(case.slots))
    other = Case(case.buffers, other_slots, case.chunk_tokens, data.draw(st.integers(1, 200)))
    rows = {slot: Case(case.buffers, [slot], 1, 1) for slot in case.slots}
    for slots, chunk in zip(other.chunks(), planned_gather(other), strict=True):
        singles = [naive_gather(rows[slot])[0] for slot in slots]
        first_byte = 0
        by_token: list[bytes] = [b""] * len(slots)
        for buffer in case.buffers.rows:
            for _ in buffer.layer_rows:
                for number in range(len(slots)):
                    by_token[number] += chunk[first_byte : first_byte + buffer.row_bytes]
                    first_byte += buffer.row_bytes
        assert singles == by_token


@given(cases())
def test_calls_are_as_long_as_allowed(case: Case) -> None:
    """A call is longer only for a single unit; only a buffer's last call may be shorter."""
    for _, buffer_plans, tasks in case.plan():
        for which, _, units, _ in (call for _, calls in tasks for call in calls):
            plan = buffer_plans[which]
            most, per_buffer = max(1, case.call_bytes // plan.unit_bytes), plan.units.shape[1]
            part = units or slice(0, per_buffer)
            assert most == plan.most_units
            assert min(most, per_buffer - part.start) == part.stop - part.start


@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize(
    ("row_count", "task_count"), [(1024, 18), (512, 9), (256, 5), (128, 3), (127, 1)]
)
def test_lanes_share_a_chunk_if_its_calls_are_long(
    is_merged: bool, row_count: int, task_count: int
) -> None:
    """Tasks are whole spans; with short calls lanes would wait for the interpreter."""
    starts = np.arange(9, dtype=np.int64) * 1024 if is_merged else np.zeros(1, np.int64)
    rows = [
        BufferRows(1024, starts, plane) for plane in (0, 1) for _ in range(1 if is_merged else 9)
    ]
    section = section_of(rows, 1024)
    ids = np.random.default_rng(2).permutation(1024)[:row_count]
    ((_, _, tasks),) = plan_chunks(
        section, buffer_sets(section, rows), ids, 0, call_bytes=1 << 20, task_bytes=1 << 20
    )
    assert task_count == len(tasks)
    assert section.span_stops(row_count) == tuple(stop for spans, _ in tasks for _, stop in spans)


@given(buffers(8))
def test_buffers_with_equal_rows_are_one_set(given: Buffers) -> None:
    """All buffers are planned in order, in as few sets as that allows."""
    sets = buffer_sets(section_of(given.rows, 4), given.rows)
    assert [*range(len(given.rows))] == [number for found in sets for number in found.numbers]
    forms = [
        {(given.rows[n].row_bytes, tuple(given.rows[n].layer_rows.tolist())) for n in found.numbers}
        for found in sets
    ]
    assert [1] * len(forms) == [len(form) for form in forms]
    assert all(left != right for left, right in pairwise(forms))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (range(128), (64, 0)),
        ([*range(64, 128), *range(64)], (64, 0)),
        (range(3, 131), (64, 3)),
        ([*range(48, 64), *range(16, 32), *range(16)], (16, 0)),
        ([*range(50, 66), *range(18, 34)], (16, 2)),
        ([*range(8), *range(12, 20)], (4, 0)),
        ([1, 0, 3, 2], (1, 0)),
        ([0, 1, 3, 4], (1, 0)),
        (range(7), (1, 0)),
        ([0, 1, 2, 3, 4, 6], (1, 0)),
    ],
    ids=["run", "pages of 64", "unaligned run", "pages of 16", "unaligned pages", "pages of 4",
         "swapped", "unlike skips", "odd count", "a gap at the end"],
)  # fmt: skip
def test_consecutive_slots_move_together(slots: Sequence[int], expected: tuple[int, int]) -> None:
    """A unit is the longest power of two of rows that divides all runs, all shifted alike."""
    (plan,) = plan_of([BufferRows(2, np.zeros(1, np.int64))], slots, 192)
    assert expected == (plan[1][0].unit_bytes // 2, plan[1][0].skip_bytes // 2)


@pytest.mark.parametrize(("layer_rows", "unit_rows"), [([0, 128], 16), ([0, 120], 8), ([1], 1)])
def test_no_unit_has_rows_of_two_layers(layer_rows: list[int], unit_rows: int) -> None:
    """Units are shorter if layers don't begin at a multiple of a page."""
    (plan,) = plan_of([BufferRows(2, np.array(layer_rows, np.int64))], range(16), 16)
    assert unit_rows * 2 == plan[1][0].unit_bytes


def test_no_slots_have_no_plan() -> None:
    """Zero tokens are a valid request."""
    assert [] == plan_of([BufferRows(2, np.zeros(1, np.int64))], [], 4)


def test_a_request_of_many_rows_is_planned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is in one part, under its number, in every section."""
    monkeypatch.setattr("kvtide.transfer.plan._PLANNED_ROWS", 20)
    rows = [BufferRows(2, np.zeros(1, np.int64), 0), BufferRows(3, np.zeros(1, np.int64), 1)]
    sections = []
    for plane, chunk_rows in ((0, 4), (1, 8)):
        section = Section(plane, (plane,), (range(1),), (rows[plane].row_bytes,), 1, chunk_rows)
        sections.append((section, buffer_sets(section, rows)))
    ids = [np.arange(41), np.arange(17)]
    parts = [*plan_in_parts(sections, ids, call_bytes=1 << 20, task_bytes=1 << 20)]
    chunks = [[(plan[0], chunk_count(plan)) for plan in part] for part in parts]
    assert [[(0, 5)], [(5, 5)], [(10, 1), (11, 2)], [(13, 1)]] == chunks


def test_rows_with_gaps_that_must_be_split_are_refused() -> None:
    """Their parts are no rows of the buffer; the message says what helps."""
    section = Section(0, (0,), (range(1),), (6,), 2, 1)
    padded = BufferRows(12, np.zeros(1, np.int64), is_padded=True)
    with pytest.raises(LayoutError, match=r"12 bytes with gaps.*2 chunks.*larger blocks"):
        buffer_sets(section, [padded])
    whole = Section(0, (0,), (range(1),), (12,), 1, 1)
    assert 1 == len(buffer_sets(whole, [padded]))


def test_rows_are_numbered_beyond_32_bits() -> None:
    """One buffer for all layers of a long pool has more rows than an int32 can count."""
    buffer = BufferRows(1, np.array([0, 3 << 32], np.int64))
    (plan,) = plan_of([buffer], [(1 << 32) + 1], 1)
    assert [[(1 << 32) + 1, (4 << 32) + 1]] == plan[1][0].units.tolist()
