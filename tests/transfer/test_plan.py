from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import SlotError
from kvtide.layout import BufferRows
from kvtide.transfer.plan import Moves, alike, checked_slots, chunk_tokens_for, plan_moves
from support.pools import Bytes, slot_lists, small_geometry

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


@dataclass(frozen=True)
class Buffers:
    """Buffers of random bytes over `slot_count` slots, merged or a layer each."""

    slot_count: int
    rows: tuple[BufferRows, ...]
    data: tuple[Bytes, ...]

    def blank(self) -> tuple[Bytes, ...]:
        """Buffers of the same sizes, of nothing but poison."""
        return tuple(np.full_like(data, 0xA5) for data in self.data)


@st.composite
def buffers(draw: st.DrawFn, slot_count: int) -> Buffers:
    """One to three planes, each merged (layers at any distance) or with a buffer per layer."""
    rows: list[BufferRows] = []
    for _ in range(draw(st.integers(1, 3))):
        row_bytes = draw(st.sampled_from((1, 2, 3, 5, 8, 16)))
        layer_count = draw(st.integers(1, 3))
        if draw(st.booleans()):
            gap, lead = draw(st.integers(0, 5)), draw(st.integers(0, 3))
            starts = lead + np.arange(layer_count, dtype=np.int64) * (slot_count + gap)
            rows.append(BufferRows(row_bytes, starts))
        else:
            rows += [BufferRows(row_bytes, np.zeros(1, np.int64))] * layer_count
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [(int(row.layer_rows[-1]) + slot_count) * row.row_bytes for row in rows]
    data = tuple(rng.integers(0, 256, size, np.uint8) for size in sizes)
    return Buffers(slot_count, tuple(rows), data)


@dataclass(frozen=True)
class Case:
    """What to plan."""

    buffers: Buffers
    slots: list[int]
    chunk_tokens: int
    longest_bytes: int

    def plan(self) -> list[list[Moves]]:
        """The plan of it."""
        ids = np.array(self.slots, np.int64)
        return plan_moves(alike(self.buffers.rows), ids, self.chunk_tokens, self.longest_bytes)

    def chunks(self) -> list[list[int]]:
        """The slots of each chunk."""
        size = self.chunk_tokens
        return [self.slots[first : first + size] for first in range(0, len(self.slots), size)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Buffers and slots of all styles, around the chunks' boundaries."""
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
    """Each chunk, row by row."""
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
    """Each chunk back, row by row."""
    for chunk, slots in zip(chunks, case.chunks(), strict=True):
        at = 0
        for rows, data in zip(case.buffers.rows, target, strict=True):
            for first in rows.layer_rows.tolist():
                for slot in slots:
                    row = np.frombuffer(chunk[at : at + rows.row_bytes], np.uint8)
                    data[(first + slot) * rows.row_bytes :][: rows.row_bytes] = row
                    at += rows.row_bytes


def units_of(case: Case, moves: Moves, buffer: int, data: Bytes) -> Bytes:
    """A buffer as `moves` reads it: uint8 [unit, byte], a view."""
    row_bytes = case.buffers.rows[buffer].row_bytes
    unit_bytes = moves.unit_rows * row_bytes
    rest = data[moves.skip_rows * row_bytes :]
    return rest[: rest.size // unit_bytes * unit_bytes].reshape(-1, unit_bytes)


def planned_gather(case: Case) -> list[bytes]:
    """Each chunk by the plan; asserts that its moves tile it."""
    token_bytes = sum(rows.row_bytes * len(rows.layer_rows) for rows in case.buffers.rows)
    sizes = [len(chunk) * token_bytes for chunk in case.chunks()]
    found: list[bytes] = []
    for part in case.plan():
        for number in range(len(part[0].units)):
            chunk = bytearray(sizes[len(found)])
            covered = np.zeros(len(chunk), int)
            for moves in part:
                first = moves.block_offset
                for buffer in moves.numbers:
                    units = units_of(case, moves, buffer, case.buffers.data[buffer])
                    piece = units[moves.units[number]].tobytes()
                    chunk[first : first + len(piece)] = piece
                    covered[first : first + len(piece)] += 1
                    first += len(piece)
            assert len(chunk) == sizes[len(found)], "nothing beyond the chunk"
            assert (covered == 1).all(), "no gap, no overlap"
            found.append(bytes(chunk))
    return found


@given(cases())
def test_gathering_by_the_plan_equals_gathering_row_by_row(case: Case) -> None:
    """Plane, layer, token: the order depends on nothing but the geometry and the slots' order."""
    assert naive_gather(case) == planned_gather(case)


@given(cases())
def test_scattering_by_the_plan_equals_scattering_row_by_row(case: Case) -> None:
    """And no other byte is written."""
    chunks = naive_gather(case)
    expected, actual = case.buffers.blank(), case.buffers.blank()
    naive_scatter(case, chunks, expected)
    numbered = iter(chunks)
    for part in case.plan():
        for number in range(len(part[0].units)):
            chunk = np.frombuffer(next(numbered), np.uint8)
            for moves in part:
                at, index = moves.block_offset, moves.units[number]
                for buffer in moves.numbers:
                    units = units_of(case, moves, buffer, actual[buffer])
                    size = index.size * units.shape[1]
                    units[index] = chunk[at : at + size].reshape(index.size, -1)
                    at += size
    assert all(np.array_equal(a, b) for a, b in zip(expected, actual, strict=True))


@given(cases(), st.data())
def test_source_and_target_may_be_grouped_differently(case: Case, data: st.DataObject) -> None:
    """A chunk holds as many bytes in the same order, wherever its tokens lie."""
    other_slots = data.draw(st.permutations(case.slots))
    other = Case(case.buffers, other_slots, case.chunk_tokens, data.draw(st.integers(1, 200)))
    rows = {slot: Case(case.buffers, [slot], 1, 1) for slot in case.slots}
    for slots, chunk in zip(other.chunks(), planned_gather(other), strict=True):
        singles = [naive_gather(rows[slot])[0] for slot in slots]
        at = 0
        by_token: list[bytes] = [b""] * len(slots)
        for buffer in case.buffers.rows:
            for _ in buffer.layer_rows:
                for number in range(len(slots)):
                    by_token[number] += chunk[at : at + buffer.row_bytes]
                    at += buffer.row_bytes
        assert singles == by_token


@given(cases())
def test_moves_stay_below_the_longest_length(case: Case) -> None:
    """Unless a single unit is longer; and as many units may move at once as that allows."""
    for part in case.plan():
        for moves in part:
            for buffer in moves.numbers:
                unit_bytes = case.buffers.rows[buffer].row_bytes * moves.unit_rows
                assert max(1, case.longest_bytes // unit_bytes) == moves.most_units


@given(buffers(8))
def test_buffers_that_lie_alike_move_as_one(given: Buffers) -> None:
    """All buffers, in their order, as few times as that allows."""
    found = alike(given.rows)
    assert [*range(len(given.rows))] == [number for one in found for number in one.numbers]
    forms = [
        [(rows.row_bytes, rows.layer_rows.tolist()) for rows in given.rows[one.numbers.start :]][
            : len(one.numbers)
        ]
        for one in found
    ]
    assert all(form == [form[0]] * len(form) for form in forms)
    assert all(left[0] != right[0] for left, right in pairwise(forms))


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
    """In the longest power of two of rows that all runs are made of, aligned or alike unaligned."""
    buffer = BufferRows(2, np.zeros(1, np.int64))
    ((moves,),) = plan_moves(alike([buffer]), np.array(slots, np.int64), 192, 1 << 20)
    assert expected == (moves.unit_rows, moves.skip_rows)


@pytest.mark.parametrize(("layer_rows", "unit_rows"), [([0, 128], 16), ([0, 120], 8), ([1], 1)])
def test_no_unit_straddles_two_layers(layer_rows: list[int], unit_rows: int) -> None:
    """Where layers don't begin at a multiple of a page, units are shorter."""
    buffer = BufferRows(2, np.array(layer_rows, np.int64))
    ((moves,),) = plan_moves(alike([buffer]), np.arange(16), 16, 1 << 20)
    assert unit_rows == moves.unit_rows


def test_no_slots_have_no_moves() -> None:
    """Zero tokens are a valid request."""
    buffer = BufferRows(2, np.zeros(1, np.int64))
    assert [] == plan_moves(alike([buffer]), np.empty(0, np.int64), 4, 1 << 20)


def test_rows_are_numbered_beyond_32_bits() -> None:
    """A merged buffer of a long pool has more rows than an int32 can count."""
    buffer = BufferRows(1, np.array([0, 3 << 32], np.int64))
    slots = np.array([(1 << 32) + 1], np.int64)
    ((moves,),) = plan_moves(alike([buffer]), slots, 1, 1 << 20)
    assert [[(1 << 32) + 1, (4 << 32) + 1]] == moves.units.tolist()


@pytest.mark.parametrize(
    ("chunk_bytes", "expected"),
    [
        (36, 1), (71, 1), (72, 2), (143, 2), (144, 4), (36 * 64 - 1, 32), (36 * 64, 64),
        (36 * 128 - 1, 64), (36 * 192, 192), (1 << 20, 29120),
    ],
)  # fmt: skip
def test_a_chunk_holds_whole_groups_of_tokens(chunk_bytes: int, expected: int) -> None:
    """As many of 64 as fit, or the largest power of two: 36 bytes a token."""
    assert expected == chunk_tokens_for(small_geometry(), chunk_bytes)


def test_a_chunk_holds_at_least_one_token() -> None:
    """Even where it is longer than a chunk should be."""
    assert 1 == chunk_tokens_for(small_geometry(), 35)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_slots_of_any_integer_dtype_are_taken(dtype: type[np.integer[Any]]) -> None:
    """They come out as int64."""
    ids = checked_slots(np.array([5, 0, 99], dtype), 300)
    assert ([5, 0, 99], "int64") == (ids.tolist(), ids.dtype.name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_slots_may_be_tensors(dtype: torch.dtype) -> None:
    """An engine's slots are."""
    assert [5, 0, 9] == checked_slots(torch.tensor([5, 0, 9], dtype=dtype), 10).tolist()


@pytest.mark.parametrize("slots", [range(2, 5), (2, 3, 4), [2, 3, 4], np.arange(9)[2:5]])
def test_slots_may_be_any_sequence(slots: Any) -> None:
    """Ranges, tuples, lists, slices."""
    assert [2, 3, 4] == checked_slots(slots, 5).tolist()


@pytest.mark.parametrize("slots", [[], (), range(0), np.empty(0, np.int32), torch.empty(0)])
def test_no_slots_are_valid(slots: Any) -> None:
    """Zero tokens, even where numpy can't tell that they were integers."""
    ids = checked_slots(slots, 0)
    assert (0, "int64") == (ids.size, ids.dtype.name)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, -1, -2], r"slot -1 at position 1 isn't in 0 … 9"),
        ([3, 10, 11], r"slot 10 at position 1 isn't in 0 … 9"),
        ([3, 11, -1], r"slot 11 at position 1"),
        (np.array([1, 2**63 + 1], np.uint64), r"slot 9223372036854775809 at position 1"),
        (np.array([-128], np.int8), r"slot -128 at position 0"),
        ([7, 3, 7, 3], r"slot 7 at position 2 is there already"),
        ([1, 3, 2, 3, 1, 2], r"slot 3 at position 3 is there already"),
        ([0, 0], r"slot 0 at position 1 is there already"),
    ],
)
def test_the_first_bad_slot_is_named(slots: Any, message: str) -> None:
    """With its position; out of range before repeated."""
    with pytest.raises(SlotError, match=message):
        checked_slots(slots, 10)


@pytest.mark.parametrize(
    "slots",
    [
        [1.0, 2.0], [True, False], np.array([1, 2], bool), torch.tensor([1.0]), [[1, 2]],
        np.zeros((0, 2), int), np.zeros((2, 0), int), 3, None, "12", [1, None], [2**70], {1, 2},
        [[1, 2], [3]], torch.tensor([1.0], dtype=torch.bfloat16), torch.empty(2, device="meta"),
        SimpleNamespace(cpu=int),
    ],
    ids=repr,
)  # fmt: skip
def test_what_are_no_slots_is_refused(slots: Any) -> None:
    """Floats, masks, matrices, single numbers, sets: each could mean something else."""
    with pytest.raises(SlotError, match="slots must be integers"):
        checked_slots(slots, 10)


@given(st.lists(st.integers(0, 30), unique=True, max_size=9), st.integers(0, 9))
def test_slots_of_the_padding_are_nobodys(slots: list[int], padding: int) -> None:
    """The first one is named; where a pool has no padding, slot 0 is one like any other."""
    bad = [slot for slot in slots if slot < padding]
    if not bad:
        assert slots == checked_slots(slots, 31, padding).tolist()
        return
    with pytest.raises(SlotError, match=f"slot {bad[0]} at position {slots.index(bad[0])} is padd"):
        checked_slots(slots, 31, padding)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_checked_slots_are_a_copy(make: Any) -> None:
    """What the caller writes into its array later can't change what moves."""
    slots = make([1, 2, 3])
    ids = checked_slots(slots, 10)
    slots[:] = 7
    assert [1, 2, 3] == ids.tolist()
