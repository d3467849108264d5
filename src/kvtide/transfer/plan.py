"""Which bytes move: the plan of a chunk, the same for both ways. Pure: no torch, no I/O.

Planes whose rows are named alike make a section: their rows move together. A section is cut
into chunks of `chunk_rows` rows, the last one shorter. A chunk's bytes are, for each plane, for
each layer, the rows in the order of the request's tokens. Sections and chunks depend on the
geometry and `chunk_bytes` alone, so any source fits any target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import LayoutError, SlotError
from kvtide.integers import integers_of
from kvtide.layout import BufferRows, Geometry

Slots = NDArray[np.int64]

_LONGEST_GROUP = 64
# Rows of that size move one by one about as fast as in groups.
_WIDE_ROW_BYTES = 8 << 10


@final
@dataclass(frozen=True, slots=True)
class Alike:
    """Buffers, one after another in a list, whose rows lie alike: what moves of one moves of all.

    `numbers` are their places in the list, `rows` says how they lie.
    """

    rows: BufferRows
    numbers: range


@final
@dataclass(frozen=True, eq=False)
class Section:
    """Buffers, or some layers of them, whose rows move together.

    `buffers` are their numbers in the pool, and `rows` what of each moves, side by side. Each row
    of the request is read as `pieces` rows here, where one alone is larger than a chunk.
    """

    group: int
    buffers: tuple[int, ...]
    rows: tuple[BufferRows, ...]
    pieces: int
    chunk_rows: int

    @cached_property
    def alike(self) -> list[Alike]:
        """Its buffers, those that lie alike together; `numbers` are places in `buffers`."""
        return alike(self.rows)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of all its buffers and layers."""
        return sum(one.row_bytes * len(one.layer_rows) for one in self.rows)

    @cached_property
    def layer_rows(self) -> int:
        """Rows of a full chunk, those of all layers counted; of buffers that lie alike once."""
        return self.chunk_rows * sum(len(one.rows.layer_rows) for one in self.alike)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk."""
        return self.chunk_rows * self.row_bytes

    def ids(self, rows: Slots) -> Slots:
        """The rows to move for `rows` of the request, int64 [row * pieces]."""
        if self.pieces == 1:
            return rows
        return (rows[:, None] * self.pieces + np.arange(self.pieces)).reshape(-1)

    def chunk_count(self, row_count: int) -> int:
        """How many chunks `row_count` rows of the request make."""
        return -(-row_count * self.pieces // self.chunk_rows)


@final
@dataclass(frozen=True, slots=True)
class Moves:
    """How some chunks of equal length move between buffers that lie alike and their blocks.

    Each buffer of `numbers`, less its first `skip_rows` rows, is read as units of `unit_rows` rows.
    Of each, chunk i has the units `units[i]` (int64 [chunk, unit]), `layer_units` of each layer; in
    its block they lie without gaps, those of the first buffer from byte `block_offset` on, then
    those of the next. No more than `most_units` should move at once.
    """

    numbers: range
    skip_rows: int
    unit_rows: int
    units: Slots
    layer_units: int
    block_offset: int
    most_units: int


def checked_slots(slots: Any, slot_count: int, padding_slots: int = 0) -> Slots:
    """A copy of `slots` as int64 [token]: what happens to the caller's array later can't matter.

    Takes whatever numpy takes for integers, and tensors that lie on a device; for those it
    blocks. Raises SlotError, naming the first bad id, for slots that aren't integers in one
    dimension, are negative, beyond the pool, repeated, or among the first `padding_slots`, which
    are nobody's: an engine's table has 0 where a token has no slot.
    """
    ids = integers_of(slots, "slot")
    if not ids.size:
        return ids
    ordered = np.sort(ids)
    if ordered[0] < 0 or ordered[-1] >= slot_count:
        at = int(((ids < 0) | (ids >= slot_count)).argmax())
        raise SlotError(f"slot {ids[at]} at position {at} isn't in 0 … {slot_count - 1}")
    if ordered[0] < padding_slots:
        at = int((ids < padding_slots).argmax())
        raise SlotError(
            f"slot {ids[at]} at position {at} is padding, so that token has none: the slots that "
            f"this pool hands out begin at {padding_slots}"
        )
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(ids, kind="stable")
        at = int(order[1:][np.diff(ids[order]) == 0].min())
        raise SlotError(f"slot {ids[at]} at position {at} is there already")
    return ids


def chunk_tokens_for(geometry: Geometry, chunk_bytes: int) -> int:
    """The most tokens that `chunk_bytes` hold, rounded down to whole groups; at least 1."""
    return _whole_groups(chunk_bytes // max(1, geometry.token_bytes))


def sections_of(buffers: Sequence[BufferRows], chunk_bytes: int) -> list[Section]:
    """The sections of a pool with these buffers, in the order in which they lie in a snapshot.

    One a group, in as many parts as it takes for a row of each part to fit into a chunk. Raises
    LayoutError where even a single row can't be cut to fit.
    """
    sections: list[Section] = []
    for group in sorted({one.group for one in buffers}):
        numbers = [number for number, one in enumerate(buffers) if one.group == group]
        layers = [(n, at) for n in numbers for at in range(len(buffers[n].layer_rows))]
        while layers:
            sections.append(_take_section(buffers, layers, chunk_bytes))
    return sections


def _take_section(
    buffers: Sequence[BufferRows], layers: list[tuple[int, int]], chunk_bytes: int
) -> Section:
    """A section of the first of `layers`, which are taken out: as many as fit into a chunk."""
    first = buffers[layers[0][0]]
    taken, size = 0, 0
    for number, _ in layers:
        size += buffers[number].row_bytes
        if size > chunk_bytes:
            break
        taken += 1
    own, layers[:] = layers[: max(1, taken)], layers[max(1, taken) :]
    pieces = 1 if taken else _pieces_of(first, chunk_bytes)
    numbers = list(dict.fromkeys(number for number, _ in own))
    rows = []
    for number in numbers:
        at = [layer for other, layer in own if other == number]
        rows.append(buffers[number].part(at[0], at[-1] + 1).cut(pieces))
    row_bytes = sum(one.row_bytes * len(one.layer_rows) for one in rows)
    chunk_rows = chunk_bytes // row_bytes
    if max(one.row_bytes for one in rows) < _WIDE_ROW_BYTES:
        chunk_rows = _whole_groups(chunk_rows)
    return Section(first.group, tuple(numbers), tuple(rows), pieces, chunk_rows)


def _pieces_of(rows: BufferRows, chunk_bytes: int) -> int:
    """The fewest equal pieces of a row that fit into a chunk each."""
    fewest = -(-rows.row_bytes // chunk_bytes)
    fitting = (n for n in range(fewest, rows.row_bytes + 1) if rows.row_bytes % n == 0)
    pieces = next(fitting)
    if rows.is_padded:
        raise LayoutError(
            f"rows of {rows.row_bytes} bytes with gaps between them can't be cut into chunks of "
            f"{chunk_bytes}; give the arena larger blocks"
        )
    return pieces


def _whole_groups(rows: int) -> int:
    """The most up to `rows`, and at least 1, that is whole groups: of the longest ones, or a power
    of two. A chunk of whole pages moves by pages."""
    if rows >= _LONGEST_GROUP:
        return rows - rows % _LONGEST_GROUP
    return 1 << (max(1, rows).bit_length() - 1)


def alike(buffers: Sequence[BufferRows]) -> list[Alike]:
    """The buffers in order, those that lie alike and follow each other as one."""
    found: list[Alike] = []
    form = None
    for number, one in enumerate(buffers):
        before, form = form, (one.row_bytes, one.is_padded, one.layer_rows.tobytes())
        first = found.pop().numbers.start if form == before else number
        found.append(Alike(one, range(first, number + 1)))
    return found


def plan_moves(
    buffers: Sequence[Alike], rows: Slots, chunk_rows: int, longest_bytes: int
) -> list[list[Moves]]:
    """The moves of all chunks of `rows` (checked): those of the full chunks, then of the rest.

    Either list is left out where there is no such chunk. What should move at once is no longer than
    `longest_bytes`, unless a single unit is. Buffers come in the chunk's order: planes, then
    layers.
    """
    full = rows.size - rows.size % chunk_rows
    parts = (rows[:full].reshape(-1, chunk_rows), rows[full:].reshape(1, -1))
    return [_plan_part(buffers, part, longest_bytes) for part in parts if part.size]


def _plan_part(buffers: Sequence[Alike], chunks: Slots, longest_bytes: int) -> list[Moves]:
    """The moves of chunks of equal length, rows int64 [chunk, row]."""
    group, skip = _grouping(chunks)
    moves: list[Moves] = []
    block_offset = 0
    for one in buffers:
        unit_rows, units = _units_of(one.rows, chunks, group, skip)
        unit_bytes = unit_rows * one.rows.row_bytes
        at, most = block_offset, max(1, longest_bytes // unit_bytes)
        layer_units = chunks.shape[1] // unit_rows
        skipped = skip % unit_rows
        moves.append(Moves(one.numbers, skipped, unit_rows, units, layer_units, at, most))
        block_offset += len(one.numbers) * units.shape[1] * unit_bytes
    return moves


def _units_of(buffer: BufferRows, chunks: Slots, group: int, skip: int) -> tuple[int, Slots]:
    """How many rows of that buffer are a unit; and the units [chunk, unit]."""
    # A unit must not straddle two layers, so each layer has to begin at one.
    unit_rows = 1 if buffer.is_padded else min(group, _alignment(buffer.layer_rows))
    firsts, bases = chunks, buffer.layer_rows
    if unit_rows > 1:
        firsts = (chunks[:, ::unit_rows] - skip % unit_rows) // unit_rows
        bases = bases // unit_rows
    return unit_rows, (bases[None, :, None] + firsts[:, None, :]).reshape(len(chunks), -1)


def _grouping(chunks: Slots) -> tuple[int, int]:
    """(group, skip): each chunk's slots are runs of `group` consecutive ones, and every run
    begins `skip` after a multiple of `group`; the longest such power of two."""
    # A power of two that divides where runs begin, in the chunks and among the slots, divides
    # what is or-ed here.
    bits = chunks.shape[1] | _LONGEST_GROUP
    if bits & 1:
        return 1, 0
    slots = chunks.reshape(-1)
    first = int(slots[0])
    starts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    bits |= int(np.bitwise_or.reduce(starts)) | int(np.bitwise_or.reduce(slots[starts] - first))
    group = bits & -bits
    return group, first % group


def _alignment(rows: Slots) -> int:
    """The largest power of two, up to the longest group, that divides every row."""
    bits = int(np.bitwise_or.reduce(rows)) | _LONGEST_GROUP
    return bits & -bits
