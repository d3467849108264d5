"""Stage 1: plans which bytes move, and by which calls. Pure: no torch, no I/O, no memory.

A chunk of a section holds the same rows of each of the section's buffers. Neighbouring rows are
joined to units, the units of a chunk are joined to calls, and calls to tasks, which the lanes
share. The same plan serves both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.errors import LayoutError
from kvtide.form import FULL_RUN_ROWS, Section
from kvtide.layout import BufferRows, Ids

# The most rows, counted in each layer, that are planned at once. Each takes some ten bytes.
_PLANNED_ROWS = 1 << 20
# For a call of this size it hardly matters if a lane has to wait for the interpreter's lock.
_LONG_CALL_BYTES = 128 << 10
# Buffers with few units share a call of up to this size, which is also hashed at once.
_JOINED_BYTES = 512 << 10


class BufferSet(NamedTuple):
    """Consecutive buffers of a chunk with equal row sizes and first rows, so they share a plan.

    `numbers` are their numbers in the pool. A row has `row_bytes`; the i-th layer of each buffer
    begins at row `first_rows[i]` (int64 [layer]). `is_padded`: there are gaps between rows.
    """

    numbers: tuple[int, ...]
    row_bytes: int
    first_rows: Ids
    is_padded: bool


class BufferPlan(NamedTuple):
    """The units of a buffer set for some chunks of equal length.

    Each buffer, without its first `skip_bytes`, is divided into units of `unit_bytes`. Chunk i has
    the units `units[i]` (int64 [chunk, unit]) of each buffer, without gaps from byte `block_offset`
    of its block on, buffer after buffer. A call moves at most `most_units` of a buffer.
    """

    buffer_set: BufferSet
    skip_bytes: int
    unit_bytes: int
    units: Ids
    block_offset: int
    most_units: int


CopyCall = tuple[int, range, slice | None, int]
"""(plan, buffers, only, stop): a call of a copier, for buffers of the buffer plan number `plan`.
`buffers` counts within the plan's buffer set. The call moves all units of these buffers, or `only`
a slice of the units of a single buffer. Its bytes end at byte `stop` of the block."""

TaskPlan = tuple[tuple[tuple[int, int], ...], tuple[CopyCall, ...]]
"""(spans, calls): the work of a lane at a time: some whole spans (first, stop) of a chunk."""

ChunkPlan = tuple[int, list[BufferPlan], list[TaskPlan]]
"""(first chunk, buffers, tasks): the plan of consecutive chunks of equal length. There are as many
chunks as lines in `units`."""


def buffer_sets(section: Section, buffer_rows: Sequence[BufferRows]) -> list[BufferSet]:
    """The buffers of a pool that belong to a section, in the order of their bytes in a chunk.

    `buffer_rows` are the pool's, plane after plane. Raises LayoutError if a row with gaps behind it
    would have to be split, since its parts wouldn't be rows of the buffer.
    """
    sets: list[BufferSet] = []
    for plane, layers, width in zip(section.planes, section.layers, section.widths, strict=True):
        first = 0
        for number, rows in enumerate(buffer_rows):
            if rows.plane != plane:
                continue
            inside = rows.layer_rows[max(0, layers.start - first) : max(0, layers.stop - first)]
            first += len(rows.layer_rows)
            if not inside.size:
                continue
            if rows.is_padded and section.row_parts > 1:
                raise LayoutError(
                    f"rows of {rows.row_bytes} bytes with gaps between them can't be split into "
                    f"{section.row_parts} chunks; give the arena larger blocks"
                )
            found = BufferSet((number,), width, inside * section.row_parts, rows.is_padded)
            if sets and _are_alike(sets[-1], found):
                found = found._replace(numbers=(*sets.pop().numbers, number))
            sets.append(found)
    return sets


def _are_alike(buffers: BufferSet, other: BufferSet) -> bool:
    return (buffers.row_bytes, buffers.is_padded) == (other.row_bytes, other.is_padded) and (
        np.array_equal(buffers.first_rows, other.first_rows)
    )


def plan_in_parts(
    sections: Sequence[tuple[Section, Sequence[BufferSet]]],
    rows: Sequence[Ids],
    *,
    call_bytes: int,
    task_bytes: int,
) -> Iterator[list[ChunkPlan]]:
    """Plans all chunks of a request's rows (checked, for each group of planes), part by part.

    A part has a limited number of rows, so that its plan is small; most requests have a single
    part. A call moves at most `call_bytes`, unless a single unit is larger. A task has `task_bytes`
    or a little more.
    """
    part: list[ChunkPlan] = []
    planned_rows, chunk = 0, 0
    for section, sets in sections:
        section_rows, chunk_rows = section.split(rows[section.group]), section.chunk_rows
        rows_of_chunk = chunk_rows * sum(len(buffers.first_rows) for buffers in sets)
        most_rows = max(1, _PLANNED_ROWS // rows_of_chunk) * chunk_rows
        for first in range(0, section_rows.size, most_rows):
            part_rows = section_rows[first : first + most_rows]
            count = -(-part_rows.size // chunk_rows)
            if planned_rows and planned_rows + count * rows_of_chunk > _PLANNED_ROWS:
                yield part
                part, planned_rows = [], 0
            planned_rows += count * rows_of_chunk
            part += plan_chunks(section, sets, part_rows, chunk, call_bytes, task_bytes)
            chunk += count
    yield part


def plan_chunks(
    section: Section,
    sets: Sequence[BufferSet],
    rows: Ids,
    first_chunk: int,
    call_bytes: int,
    task_bytes: int,
) -> list[ChunkPlan]:
    """Plans the chunks of a section's `rows`: the full chunks, then a shorter last chunk."""
    full = rows.size - rows.size % section.chunk_rows
    plans: list[ChunkPlan] = []
    for chunks in (rows[:full].reshape(-1, section.chunk_rows), rows[full:].reshape(1, -1)):
        if chunks.size:
            buffers = _plan_buffers(sets, chunks, call_bytes)
            tasks = _plan_tasks(buffers, section.span_stops(chunks.shape[1]), task_bytes)
            plans.append((first_chunk, buffers, tasks))
            first_chunk += len(chunks)
    return plans


def _plan_buffers(sets: Sequence[BufferSet], chunks: Ids, call_bytes: int) -> list[BufferPlan]:
    """Buffer plans for chunks of equal length. `chunks` has their rows, int64 [chunk, row]."""
    run_rows, skip_rows = _runs_in(chunks)
    plans: list[BufferPlan] = []
    block_offset = 0
    for buffers in sets:
        unit_rows, units = _units_of(buffers, chunks, run_rows, skip_rows)
        unit_bytes = unit_rows * buffers.row_bytes
        skip_bytes = skip_rows % unit_rows * buffers.row_bytes
        most_units = max(1, call_bytes // unit_bytes)
        plans.append(BufferPlan(buffers, skip_bytes, unit_bytes, units, block_offset, most_units))
        block_offset += len(buffers.numbers) * units.shape[1] * unit_bytes
    return plans


def _units_of(buffers: BufferSet, chunks: Ids, run_rows: int, skip_rows: int) -> tuple[int, Ids]:
    """(unit_rows, units): the rows of a unit in these buffers, and the units [chunk, unit]."""
    # A unit must not straddle two layers, so each layer has to begin at a unit.
    unit_rows = 1 if buffers.is_padded else min(run_rows, _alignment_of(buffers.first_rows))
    units, first_units = chunks, buffers.first_rows
    if unit_rows > 1:
        units = (chunks[:, ::unit_rows] - skip_rows % unit_rows) // unit_rows
        first_units = first_units // unit_rows
    return unit_rows, (first_units[None, :, None] + units[:, None, :]).reshape(len(chunks), -1)


def _runs_in(chunks: Ids) -> tuple[int, int]:
    """(run_rows, skip_rows): how the rows of the chunks are divided into runs.

    A run is `run_rows` consecutive rows and begins `skip_rows` behind a multiple of `run_rows`,
    which is the largest possible power of two.
    """
    # A power of two divides the OR of some numbers only if it divides each of them. These numbers
    # are the places in the chunks at which runs begin, and the distances of their first rows.
    bits = chunks.shape[1] | FULL_RUN_ROWS
    if bits & 1:
        return 1, 0
    rows = chunks.reshape(-1)
    first = int(rows[0])
    starts = (rows[1:] - rows[:-1] != 1).nonzero()[0] + 1
    bits |= int(np.bitwise_or.reduce(starts)) | int(np.bitwise_or.reduce(rows[starts] - first))
    run_rows = bits & -bits
    return run_rows, first % run_rows


def _alignment_of(rows: Ids) -> int:
    """The largest power of two, up to FULL_RUN_ROWS, that divides every row."""
    bits = int(np.bitwise_or.reduce(rows)) | FULL_RUN_ROWS
    return bits & -bits


def _plan_tasks(
    plans: Sequence[BufferPlan], span_stops: Sequence[int], task_bytes: int
) -> list[TaskPlan]:
    """The tasks of a chunk. A task takes whole spans until it has `task_bytes`.

    A chunk whose calls are short is a single task: if lanes shared it, they would lose more time at
    the interpreter's lock than they gain.
    """
    tasks: list[TaskPlan] = []
    calls: list[CopyCall] = []
    spans: list[tuple[int, int]] = []
    first = 0
    for stop in span_stops:
        spans.append((spans[-1][1] if spans else first, stop))
        is_last = stop == span_stops[-1]
        if is_last or (stop - first >= task_bytes and _is_long(plans, stop)):
            for number, plan in enumerate(plans):
                calls += _calls_of(number, plan, first, stop)
            tasks.append((tuple(spans), tuple(calls)))
            first, calls, spans = stop, [], []
    return tasks


def _is_long(plans: Sequence[BufferPlan], stop: int) -> bool:
    """Whether the layer that ends at byte `stop` of a chunk is moved by long calls."""
    plan = next(plan for plan in reversed(plans) if plan.block_offset < stop)
    layer_units = plan.units.shape[1] // len(plan.buffer_set.first_rows)
    return bool(layer_units * plan.unit_bytes >= _LONG_CALL_BYTES)


def _calls_of(number: int, plan: BufferPlan, first: int, stop: int) -> Iterator[CopyCall]:
    """The calls that move a buffer plan's part of the bytes `first` to `stop` of a chunk.

    Buffers with few units share a call. Buffers with many units have a call each, or several.
    """
    per_buffer, unit_bytes = plan.units.shape[1], plan.unit_bytes
    unit_count = len(plan.buffer_set.numbers) * per_buffer
    unit = max(0, (first - plan.block_offset) // unit_bytes)
    end = min(unit_count, (stop - plan.block_offset) // unit_bytes)
    joined = -(-_JOINED_BYTES // (per_buffer * unit_bytes))
    while unit < end:
        buffer, begin = divmod(unit, per_buffer)
        if begin == 0 and per_buffer <= min(plan.most_units, end - unit):
            count = min(joined, (end - unit) // per_buffer)
            buffers, only = range(buffer, buffer + count), None
            unit += count * per_buffer
        else:
            until = min(per_buffer, begin + plan.most_units, begin + end - unit)
            buffers, only = range(buffer, buffer + 1), slice(begin, until)
            unit += until - begin
        yield number, buffers, only, plan.block_offset + unit * unit_bytes
