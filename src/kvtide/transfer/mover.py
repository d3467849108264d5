"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
import xxhash

from kvtide.device import Block, Job, Step
from kvtide.errors import SnapshotDamaged, SnapshotMiss
from kvtide.layout import Ids
from kvtide.pool import Pool
from kvtide.transfer.copies import Copies, DeviceCopies, HostCopies, Move, Run, Units, runs_of
from kvtide.transfer.plan import Moves, Section, plan_moves, sections_of

# So many views of buffers are kept from move to move; each is some hundred bytes.
_MOST_UNITS = 4096
# So much is hashed at once, as soon as it is there: with what it was copied from, it is still in
# the core's own cache.
_HASHED_BYTES = 256 << 10
# Moves of that size are long beside what it costs when two lanes want the interpreter at once.
_LONG_MOVE_BYTES = 128 << 10

_Phases = Iterator[Sequence[Step[int]]]


@final
class Mover:
    """Copies rows between a pool and host blocks, a chunk of rows a block.

    All copying is of bytes, so every dtype moves, NaN payloads included. Rows come checked
    (`Pool.rows_of`), those of each group of planes; a block is uint8 [block_bytes], of which a
    chunk of up to `chunk_bytes` fills the beginning. Both ways return a job, which with `at_once`
    may have ended.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[int, list[Section]] = {}
        self._row_bytes = [0] * (1 + max((one.group for one in pool.buffer_rows), default=0))
        for one in pool.buffer_rows:
            self._row_bytes[one.group] += one.row_bytes * len(one.layer_rows)
        self._units: dict[tuple[tuple[int, ...], int, int], Units] = {}

    def chunk_count(self, rows: Sequence[Ids], chunk_bytes: int) -> int:
        """The chunks, which is as many blocks, that these rows of each group make."""
        sections = self.sections(chunk_bytes)
        return sum(one.chunk_count(rows[one.group].size) for one in sections)

    def size_bytes(self, rows: Sequence[Ids]) -> int:
        """Bytes of these rows of each group."""
        return sum(one.size * size for one, size in zip(rows, self._row_bytes, strict=True))

    def gather(
        self,
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        *,
        chunk_bytes: int,
        seal: bool = True,
        at_once: bool = False,
    ) -> Job[list[int]]:
        """Rows to blocks. The job's results are checksums, of each chunk those of its pieces
        (zeros without `seal`). `at_once`: see Device.submit.

        The blocks belong to the job until it has ended, and the rows must not be written.
        """

        def phases() -> _Phases:
            pieces = self._pieces(rows, blocks, chunk_bytes)
            if seal:
                yield [Step(piece.checksum, piece.gather_hashing) for piece in pieces]
            else:
                yield [Step(_nothing, piece.gather) for piece in pieces]

        return self._submit(phases, chunk_bytes, at_once)

    def scatter(
        self,
        blocks: Sequence[Block],
        rows: Sequence[Ids],
        *,
        chunk_bytes: int,
        checksums: Sequence[int] | None,
        at_once: bool = False,
    ) -> Job[list[int]]:
        """Blocks to rows, after all blocks have been found to be as they were sealed.

        The job raises SnapshotDamaged, naming the first bad chunk, before anything is written.
        With None for checksums nothing is checked: for benchmarks. The blocks and the rows
        belong to the job until it has ended. `at_once`: see Device.submit.
        """

        def phases() -> _Phases:
            pieces = self._pieces(rows, blocks, chunk_bytes)
            if checksums is not None:
                if len(checksums) != len(pieces):
                    raise SnapshotMiss(
                        f"snapshot is sealed in {len(checksums)} pieces, the target moves it in "
                        f"{len(pieces)}: its device takes others than that of the source"
                    )
                sealed = zip(pieces, checksums, strict=True)
                yield [Step(_checking(piece, one)) for piece, one in sealed]
            yield [Step(_nothing, piece.scatter) for piece in pieces]

        return self._submit(phases, chunk_bytes, at_once)

    def _submit(
        self, phases: Callable[[], _Phases], chunk_bytes: int, at_once: bool
    ) -> Job[list[int]]:
        # Made in the calling thread, so that the queue's only reads them.
        largest = max(one.chunk_bytes for one in self.sections(chunk_bytes))
        return self._pool.device.submit(phases, staging_bytes=largest, at_once=at_once)

    def sections(self, chunk_bytes: int) -> list[Section]:
        """What moves together in such chunks; LayoutError for a row that can't be cut to fit."""
        if chunk_bytes not in self._known:
            self._known[chunk_bytes] = sections_of(self._pool.buffer_rows, chunk_bytes)
        return self._known[chunk_bytes]

    def _pieces(
        self, rows: Sequence[Ids], blocks: Sequence[Block], chunk_bytes: int
    ) -> list[_Piece]:
        """What the lanes need. A call from Python in one lane is a wait for the interpreter's
        lock in the other, so all that can be done once for all chunks is done here."""
        pieces: list[_Piece] = []
        first = 0
        for section in self.sections(chunk_bytes):
            count = section.chunk_count(rows[section.group].size)
            own = blocks[first : first + count]
            assert len(own) == count, f"{len(blocks)} blocks are too few: one a chunk"
            pieces += self._section_pieces(section, rows[section.group], own, first)
            first += count
        assert first == len(blocks), f"{len(blocks)} blocks are too many: one a chunk"
        return pieces

    def _section_pieces(
        self, section: Section, rows: Ids, blocks: Sequence[Block], first_chunk: int
    ) -> list[_Piece]:
        ids, size = section.ids(rows), section.chunk_rows
        pieces: list[_Piece] = []
        done = 0
        for part in plan_moves(section.alike, ids, size, self._pool.device.move_bytes):
            stop = done + len(part[0].units)
            for run in runs_of(blocks[done:stop]):
                copies = self._copies(section, part, run, done - stop + len(part[0].units))
                cuts = _cut(part, copies, self._pool.device.chunk_bytes)
                pieces += [
                    _Piece(first_chunk + done + number, run, number, first, own)
                    for number in range(run.count)
                    for first, own in cuts
                ]
                done += run.count
        return pieces

    def _copies(
        self, section: Section, part: Sequence[Moves], run: Run, first: int
    ) -> list[Copies]:
        """The copies of the chunks in `run`, the first of which is number `first` of `part`."""
        device = self._pool.device
        copies: list[Copies] = []
        for moves in part:
            source, at = self._units_of(section, moves), moves.block_offset
            index = moves.units[first : first + run.count]
            if source.in_memory:
                copies.append(HostCopies(source, index, run, at, moves.most_units))
                continue
            of_device = device.upload(torch.from_numpy(index))
            copies.append(DeviceCopies(source, of_device, run, at, device.elements))
        return copies

    def _units_of(self, section: Section, moves: Moves) -> Units:
        """Buffers as units of that size; known from the last time, mostly."""
        numbers = section.buffers[moves.numbers.start : moves.numbers.stop]
        row_bytes = section.rows[moves.numbers.start].row_bytes
        form = (numbers, moves.skip_rows * row_bytes, moves.unit_rows * row_bytes)
        if form not in self._units:
            if sum(map(len, self._units.values())) + len(numbers) > _MOST_UNITS:
                self._units.clear()
            self._units[form] = Units([self._pool.buffers[n] for n in numbers], *form[1:])
        return self._units[form]


def _cut(
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
class _Piece:
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


def _checking(piece: _Piece, sealed: int) -> Callable[[], int]:
    def check() -> int:
        found = piece.checksum()
        if found != sealed:
            raise SnapshotDamaged(
                f"chunk {piece.chunk}: {piece.size_bytes} bytes with checksum {found:016x}, "
                f"sealed as {sealed:016x}; nothing was restored, so recompute this request"
            )
        return found

    return check


def _nothing() -> int:
    return 0
