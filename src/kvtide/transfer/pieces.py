"""Pieces: what a lane moves at once, most often a whole chunk; and where a chunk is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
import xxhash

from kvtide.transfer.copies import Copies, Move, Run
from kvtide.transfer.plan import Moves

# So much is hashed at once, as soon as it is there: with what it was copied from, it is still in
# the core's own cache.
_HASHED_BYTES = 256 << 10
# Moves of that size are long beside what it costs when two lanes want the interpreter at once.
_LONG_MOVE_BYTES = 128 << 10


def cut(
    part: Sequence[Moves], copies: Sequence[Copies], piece_bytes: int
) -> list[tuple[int, list[Move]]]:
    """Of a chunk the pieces, with the byte where each begins.

    A piece ends with a layer, and has so many bytes; less only if it is the last. So pieces depend
    on geometry and device alone, wherever slots and layers lie. Where moves are short a chunk is
    one: lanes would wait for each other more than they gain.
    """
    pieces: list[tuple[int, list[Move]]] = []
    first, stop, own = 0, 0, list[Move]()
    for moves, copy in zip(part, copies, strict=True):
        layer_bytes = moves.layer_units * copy.unit_bytes
        is_long = layer_bytes >= _LONG_MOVE_BYTES
        unit, unit_count = 0, len(moves.numbers) * moves.units.shape[1]
        while unit < unit_count:
            layers = -(-(first + piece_bytes - stop) // layer_bytes)
            end = min(unit_count, unit + max(1, layers) * moves.layer_units)
            end = end if is_long else unit_count
            for buffers, span, count in _spans(moves, unit, end, copy.unit_bytes):
                stop += count * copy.unit_bytes
                own.append(Move(copy, buffers, span, stop))
            unit = end
            if is_long and stop - first >= piece_bytes:
                pieces.append((first, own))
                first, own = stop, []
    if own:
        pieces.append((first, own))
    return pieces


def _spans(
    moves: Moves, unit: int, end: int, unit_bytes: int
) -> Iterator[tuple[range, slice | None, int]]:
    """What moves in one go of these units, counted through all buffers: of which buffers, which
    of each (None: all), and how many."""
    per_buffer = moves.units.shape[1]
    together = -(-_HASHED_BYTES // (per_buffer * unit_bytes))
    while unit < end:
        at, begin = divmod(unit, per_buffer)
        if begin == 0 and per_buffer <= min(moves.most_units, end - unit):
            count = min(together, (end - unit) // per_buffer)
            yield range(at, at + count), None, count * per_buffer
            unit += count * per_buffer
        else:
            stop = min(per_buffer, begin + moves.most_units, begin + end - unit)
            yield range(at, at + 1), slice(begin, stop), stop - begin
            unit += stop - begin


@final
class Piece:
    """What a lane moves at once, most often a whole chunk: from byte `first` of it on.

    `number` is that of its chunk in `run`, which `moves` are of.
    """

    def __init__(
        self, chunk: int, run: Run, number: int, first: int, moves: Sequence[Move]
    ) -> None:
        self.chunk = chunk
        self._run = run
        self._number = number
        self._moves = moves
        self._checksum: int | None = None
        self._first = first
        self._stop = moves[-1].stop

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece."""
        return self._stop - self._first

    def gather(self, staging: torch.Tensor | None) -> None:
        """Units of the buffers to the block, by way of `staging` if there is any."""
        for one in self._moves:
            one.gather(self._number, staging)
        if staging is not None:
            self._block().copy_(staging[self._first : self._stop], non_blocking=True)

    def gather_hashing(self, staging: torch.Tensor | None) -> None:
        """The same; without staging the checksum is known then as well."""
        if staging is not None or self.size_bytes <= _HASHED_BYTES:
            self.gather(staging)
            return
        checksum, hashed = xxhash.xxh3_64(), self._first
        for one in self._moves:
            one.gather(self._number, None)
            if one.stop - hashed >= _HASHED_BYTES or one.stop == self._stop:
                checksum.update(self._memory(hashed, one.stop))
                hashed = one.stop
        self._checksum = checksum.intdigest()

    def scatter(self, staging: torch.Tensor | None) -> None:
        """The block to units of the buffers, by way of `staging` if there is any."""
        if staging is not None:
            staging[self._first : self._stop].copy_(self._block(), non_blocking=True)
        for one in self._moves:
            one.scatter(self._number, staging)

    def checksum(self) -> int:
        """XXH3 64 of its bytes in the block."""
        if self._checksum is None:
            self._checksum = xxhash.xxh3_64_intdigest(self._memory(self._first, self._stop))
        return self._checksum

    def _block(self) -> torch.Tensor:
        return self._run.slab[self._run.span(self._number, self._first, self._stop)]

    def _memory(self, first: int, stop: int) -> memoryview:
        return self._run.memory[self._run.span(self._number, first, stop)].data
