"""Which bytes move: the plan of a chunk, the same for both ways. Pure: no torch, no I/O.

A snapshot is cut into chunks of `chunk_tokens` tokens, the last one shorter. A chunk's bytes
are, for each plane, for each layer, one row a token in the order of the slots. That order
depends on the geometry and the token count alone, so any source fits any target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import SlotError
from kvtide.layout import BufferRows, Geometry

Slots = NDArray[np.int64]

# A chunk of a megabyte is small enough to be hashed while it is in a core's cache and large
# enough to hide what a call costs.
CHUNK_BYTES = 1 << 20
_LONGEST_GROUP = 64


@final
@dataclass(frozen=True, slots=True)
class Moves:
    """How some chunks of equal length move between one buffer and their blocks.

    The buffer, less its first `skip_rows` rows, is read as units of `unit_rows` rows. Chunk i
    consists of the units `units[i]` (int64 [chunk, unit]); in its block they lie without gaps
    from byte `block_offset` on.
    """

    buffer: int
    skip_rows: int
    unit_rows: int
    units: Slots
    block_offset: int


def checked_slots(slots: Any, slot_count: int) -> Slots:
    """A copy of `slots` as int64 [token]: what happens to the caller's array later can't matter.

    Takes whatever numpy takes for integers. Raises SlotError, naming the first bad id, for
    slots that aren't integers in one dimension, are negative, beyond the pool, or repeated.
    """
    try:
        given = np.asarray(slots)
    except (TypeError, ValueError) as error:
        raise SlotError(f"slots must be integers [token]: {error}") from error
    if given.size == 0 and given.ndim == 1:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise SlotError(f"slots must be integers [token], not {given.dtype} {list(given.shape)}")
    outside = (given < 0) | (given >= slot_count)
    if outside.any():
        at = int(outside.argmax())
        raise SlotError(f"slot {given[at]} at position {at} isn't in 0 … {slot_count - 1}")
    ids = given.astype(np.int64)
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(np.diff(ids[order]) == 0)
    if repeated.size:
        at = int(order[repeated + 1].min())
        raise SlotError(f"slot {ids[at]} at position {at} is there already")
    return ids


def chunk_tokens_for(geometry: Geometry, chunk_bytes: int = CHUNK_BYTES) -> int:
    """The tokens of a full chunk: the largest power of two that `chunk_bytes` hold, at least 1.

    A power of two, so that a chunk of whole pages can move page by page.
    """
    fit = max(1, chunk_bytes // geometry.token_bytes)
    return 1 << (fit.bit_length() - 1)


def plan_moves(
    buffers: Sequence[BufferRows], slots: Slots, chunk_tokens: int, longest_bytes: int
) -> list[list[Moves]]:
    """The moves of all chunks of `slots` (checked): those of the full chunks, then of the rest.

    Either list is left out where there is no such chunk. No unit row of a move is longer than
    `longest_bytes`, unless a single unit is. Buffers come in the chunk's order: planes, then
    layers.
    """
    full = slots.size - slots.size % chunk_tokens
    parts = (slots[:full].reshape(-1, chunk_tokens), slots[full:].reshape(1, -1))
    return [_plan_part(buffers, part, longest_bytes) for part in parts if part.size]


def _plan_part(buffers: Sequence[BufferRows], chunks: Slots, longest_bytes: int) -> list[Moves]:
    """The moves of chunks of equal length, slots int64 [chunk, token]."""
    group, skip = _grouping(chunks)
    moves: list[Moves] = []
    block_offset = 0
    for number, buffer in enumerate(buffers):
        # A unit must not straddle two layers, so each layer has to begin at one.
        unit_rows = min(group, _alignment(buffer.layer_rows))
        skip_rows = skip % unit_rows
        firsts = (chunks[:, ::unit_rows] - skip_rows) // unit_rows
        bases = buffer.layer_rows // unit_rows
        units = (bases[None, :, None] + firsts[:, None, :]).reshape(len(chunks), -1)
        unit_bytes = unit_rows * buffer.row_bytes
        step = max(1, longest_bytes // unit_bytes)
        for first in range(0, units.shape[1], step):
            part = units[:, first : first + step]
            moves.append(Moves(number, skip_rows, unit_rows, part, block_offset))
            block_offset += part.shape[1] * unit_bytes
    return moves


def _grouping(chunks: Slots) -> tuple[int, int]:
    """(group, skip): each chunk's slots are runs of `group` consecutive ones, and every run
    begins `skip` after a multiple of `group`; the longest such power of two."""
    group = _LONGEST_GROUP
    while group > 1:
        if chunks.shape[1] % group == 0:
            runs = chunks.reshape(-1, group)
            skips = runs[:, 0] % group
            if (np.diff(runs, axis=1) == 1).all() and (skips == skips[0]).all():
                return group, int(skips[0])
        group //= 2
    return 1, 0


def _alignment(rows: Slots) -> int:
    """The largest power of two, up to the longest group, that divides every row."""
    bits = int(np.bitwise_or.reduce(rows)) | _LONGEST_GROUP
    return bits & -bits
