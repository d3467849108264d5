"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from kvtide.device import Block, Job, Step
from kvtide.errors import SlotsLost, SnapshotDamaged, SnapshotMiss, first_line
from kvtide.layout import Ids
from kvtide.pool import Pool
from kvtide.transfer.copies import Copies, DeviceCopies, HostCopies, Run, Units, runs_of
from kvtide.transfer.pieces import Piece, cut
from kvtide.transfer.plan import Moves, Section, plan_moves, sections_of

# So many views of buffers are kept from move to move; each is some hundred bytes.
_MOST_UNITS = 4096
# So many rows, of all layers, are planned at once: a plan takes some ten bytes for each.
_PLANNED_ROWS = 1 << 20

_Phases = Iterator[Sequence[Step[int]]]
_Chunks = tuple[Section, Ids, Sequence[Block], int]
"""Chunks of a section: their rows, their blocks, and the number of the first of them."""


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
        owner: object = None,
    ) -> Job[list[int]]:
        """Rows to blocks. The job's results are checksums, of each chunk those of its pieces
        (zeros without `seal`). `at_once`: see Device.submit.

        The blocks belong to the job until it has ended, and the rows must not be written. Whoever
        owns the blocks, `owner`, is kept alive until then.
        """

        def phases() -> _Phases:
            _ = owner  # whom whoever has the plan, or is at work on it, holds with it
            for part in self._parts(rows, blocks, chunk_bytes):
                pieces = self._pieces(part)
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
        owner: object = None,
    ) -> Job[list[int]]:
        """Blocks to rows, after all blocks have been found to be as they were sealed.

        The job raises SnapshotDamaged, naming the first bad chunk, before anything is written, and
        SlotsLost where the device fails after that. With None for checksums nothing is checked: for
        benchmarks. The blocks and the rows belong to the job until it has ended. `at_once`: see
        Device.submit; `owner`: see `gather`.
        """
        writing: list[bool] = []

        def phases() -> _Phases:
            _ = owner
            parts = self._parts(rows, blocks, chunk_bytes)
            pieces = self._pieces(parts[0])
            if checksums is not None:
                found = 0
                for number, part in enumerate(parts):
                    pieces = self._pieces(part) if number else pieces
                    sealed = checksums[found : found + len(pieces)]
                    found += len(pieces)
                    if number == len(parts) - 1:
                        _check_count(len(checksums), found)
                    yield [Step(_checking(*one)) for one in zip(pieces, sealed, strict=False)]
            for part in parts:
                pieces = self._pieces(part) if len(parts) > 1 else pieces
                steps = [Step(_nothing, piece.scatter) for piece in pieces]
                writing.append(True)
                yield steps

        return _Writing(self._submit(phases, chunk_bytes, at_once), writing)

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

    def _parts(
        self, rows: Sequence[Ids], blocks: Sequence[Block], chunk_bytes: int
    ) -> list[list[_Chunks]]:
        """The move in parts, which are planned one at a time: each has so few rows that its plan is
        small. Most moves are one."""
        parts: list[list[_Chunks]] = [[]]
        planned, first = 0, 0
        for section in self.sections(chunk_bytes):
            ids, size = section.ids(rows[section.group]), section.chunk_rows
            count = section.chunk_count(rows[section.group].size)
            own = blocks[first : first + count]
            assert len(own) == count, f"{len(blocks)} blocks are too few: one a chunk"
            step = max(1, _PLANNED_ROWS // section.layer_rows)
            for at in range(0, count, step):
                stop = min(count, at + step)
                rows_more = (stop - at) * section.layer_rows
                if planned and planned + rows_more > _PLANNED_ROWS:
                    parts.append([])
                    planned = 0
                planned += rows_more
                part = ids[at * size : stop * size]
                parts[-1].append((section, part, own[at:stop], first + at))
            first += count
        assert first == len(blocks), f"{len(blocks)} blocks are too many: one a chunk"
        return parts

    def _pieces(self, part: Sequence[_Chunks]) -> list[Piece]:
        """What the lanes need. A call from Python in one lane is a wait for the interpreter's
        lock in the other, so all that can be done once for all chunks is done here."""
        pieces: list[Piece] = []
        for chunks in part:
            pieces += self._section_pieces(*chunks)
        return pieces

    def _section_pieces(
        self, section: Section, ids: Ids, blocks: Sequence[Block], first_chunk: int
    ) -> list[Piece]:
        size = section.chunk_rows
        pieces: list[Piece] = []
        done = 0
        for part in plan_moves(section.alike, ids, size, self._pool.device.move_bytes):
            stop = done + len(part[0].units)
            for run in runs_of(blocks[done:stop]):
                copies = self._copies(section, part, run, done - stop + len(part[0].units))
                cuts = cut(part, copies, self._pool.device.chunk_bytes)
                pieces += [
                    Piece(first_chunk + done + number, run, number, first, own)
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


@final
class _Writing:
    """A job that writes once `writing` isn't empty. What fails from then on has lost the rows."""

    def __init__(self, job: Job[list[int]], writing: Sequence[bool]) -> None:
        self._job = job
        self._writing = writing

    def done(self) -> bool:
        """See Job."""
        return self._job.done()

    def wait(self) -> list[int]:
        """See Job."""
        try:
            return self._job.wait()
        except Exception as error:
            if not self._writing or not self._job.done():  # it is a signal's that ended the wait
                raise
            raise SlotsLost(
                f"a restore broke off while it wrote ({first_line(error)}): its slots hold neither "
                "the old bytes nor the new; release them, and restore the snapshot elsewhere or "
                "recompute this request"
            ) from error


def _check_count(sealed: int, found: int) -> None:
    if sealed != found:
        raise SnapshotMiss(
            f"snapshot is sealed in {sealed} pieces, the target moves it in {found}: its device "
            "takes others than that of the source"
        )


def _checking(piece: Piece, sealed: int) -> Callable[[], int]:
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
