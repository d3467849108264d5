"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import final

import torch
import xxhash

from kvtide.device import Block, Job, Step
from kvtide.errors import SnapshotDamaged
from kvtide.layout import Ids
from kvtide.pool import Pool
from kvtide.transfer.plan import Moves, Section, plan_moves, sections_of

_Phases = Iterator[Sequence[Step[int]]]


@final
class Mover:
    """Copies rows between a pool and host blocks, a chunk of rows a block.

    All copying is of bytes, in elements as wide as alignment allows, so every dtype moves,
    NaN payloads included. Rows come checked (`Pool.rows_of`), those of each group of planes; a
    block is uint8 [block_bytes], of which a chunk of up to `chunk_bytes` fills the beginning.
    Both ways return at once.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[int, list[Section]] = {}

    def chunk_count(self, rows: Sequence[Ids], chunk_bytes: int) -> int:
        """The chunks, which is as many blocks, that these rows of each group make."""
        sections = self.sections(chunk_bytes)
        return sum(one.chunk_count(rows[one.group].size) for one in sections)

    def size_bytes(self, rows: Sequence[Ids]) -> int:
        """Bytes of these rows of each group."""
        return sum(
            one.row_bytes * len(one.layer_rows) * rows[one.group].size
            for one in self._pool.buffer_rows
        )

    def gather(
        self,
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        *,
        chunk_bytes: int,
        seal: bool = True,
    ) -> Job[list[int]]:
        """Rows to blocks. The job's results are the chunks' checksums (zeros without `seal`).

        The blocks belong to the job until it has ended, and the rows must not be written.
        """

        def phases() -> _Phases:
            chunks = self._chunks(rows, blocks, chunk_bytes)
            yield [Step(chunk.checksum if seal else _nothing, chunk.gather) for chunk in chunks]

        return self._submit(phases, chunk_bytes)

    def scatter(
        self,
        blocks: Sequence[Block],
        rows: Sequence[Ids],
        *,
        chunk_bytes: int,
        checksums: Sequence[int] | None,
    ) -> Job[list[int]]:
        """Blocks to rows, after all blocks have been found to be as they were sealed.

        The job raises SnapshotDamaged, naming the first bad chunk, before anything is written.
        With None for checksums nothing is checked: for benchmarks. The blocks and the rows
        belong to the job until it has ended.
        """

        def phases() -> _Phases:
            chunks = self._chunks(rows, blocks, chunk_bytes)
            if checksums is not None:
                sealed = zip(chunks, checksums, strict=True)
                yield [Step(_checking(i, chunk, one)) for i, (chunk, one) in enumerate(sealed)]
            yield [Step(_nothing, chunk.scatter) for chunk in chunks]

        return self._submit(phases, chunk_bytes)

    def _submit(self, phases: Callable[[], _Phases], chunk_bytes: int) -> Job[list[int]]:
        # Made in the calling thread, so that the queue's only reads them.
        largest = max(one.chunk_bytes for one in self.sections(chunk_bytes))
        return self._pool.device.submit(phases, staging_bytes=largest)

    def sections(self, chunk_bytes: int) -> list[Section]:
        """What moves together in such chunks; LayoutError for a row that can't be cut to fit."""
        if chunk_bytes not in self._known:
            self._known[chunk_bytes] = sections_of(self._pool.buffer_rows, chunk_bytes)
        return self._known[chunk_bytes]

    def _chunks(
        self, rows: Sequence[Ids], blocks: Sequence[Block], chunk_bytes: int
    ) -> list[_Chunk]:
        """What the lanes need. A call from Python in one lane is a wait for the interpreter's
        lock in the other, so all that can be done once for all chunks is done here."""
        chunks: list[_Chunk] = []
        for section in self.sections(chunk_bytes):
            count = section.chunk_count(rows[section.group].size)
            own = blocks[len(chunks) : len(chunks) + count]
            chunks += self._section_chunks(section, rows[section.group], own)
        assert len(chunks) == len(blocks), "one block a chunk"
        return chunks

    def _section_chunks(self, section: Section, rows: Ids, blocks: Sequence[Block]) -> list[_Chunk]:
        ids, size = section.ids(rows), section.chunk_rows
        chunks: list[_Chunk] = []
        for part in plan_moves(section.rows, ids, size, self._pool.device.move_bytes):
            size_bytes = min(size, ids.size - len(chunks) * size) * section.row_bytes
            stop = len(chunks) + len(part[0].units)
            for run in _runs_of(blocks[len(chunks) : stop]):
                first = len(chunks) - stop + len(part[0].units)
                copies = [self._copies(section, moves, run, first) for moves in part]
                chunks += [
                    _Chunk(number, run.block(number, size_bytes), copies)
                    for number in range(run.count)
                ]
        return chunks

    def _copies(self, section: Section, moves: Moves, run: _Run, first: int) -> _Copies:
        """The copies of the chunks in `run`, the first of which is number `first` of `moves`."""
        device, row_bytes = self._pool.device, section.rows[moves.buffer].row_bytes
        unit_bytes = moves.unit_rows * row_bytes
        buffer = self._pool.buffers[section.buffers[moves.buffer]]
        sizes = [unit_bytes, moves.block_offset, run.first, run.step]
        if buffer.dim() == 1:
            buffer = buffer[moves.skip_rows * row_bytes :]
            buffer = buffer[: buffer.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
        dtype = _widest(device.elements, [*sizes, buffer.stride(0)], buffer, run.slab)
        shape = (moves.units.shape[1], unit_bytes // dtype.itemsize)
        return _Copies(
            buffer.view(dtype),
            device.upload(torch.from_numpy(moves.units)[first : first + run.count]),
            run.parts(moves.block_offset, dtype, shape),
            moves.block_offset,
        )


@final
@dataclass(frozen=True, slots=True)
class _Copies:
    """What moves between one buffer and the blocks of one run, for each of its chunks."""

    units: torch.Tensor
    """The buffer, as units [unit, element]."""
    index: torch.Tensor
    """The units that move, int64 [chunk, unit]."""
    parts: torch.Tensor
    """Their place in the blocks [chunk, unit, element]."""
    block_offset: int
    """In bytes, where that place begins in each block."""

    def staged(self, staging: torch.Tensor) -> torch.Tensor:
        """The place of one chunk's units in `staging`, which is laid out like a block."""
        place, size_bytes = self.parts[0], self.parts[0].nbytes
        part = staging[self.block_offset : self.block_offset + size_bytes]
        return part.view(place.dtype).view(place.shape)


@final
class _Chunk:
    """One chunk: its number in the run that `copies` are of, and its bytes in the block."""

    def __init__(self, number: int, block: torch.Tensor, copies: Sequence[_Copies]) -> None:
        self._number = number
        self._block = block
        self._copies = copies

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk."""
        return self._block.numel()

    def gather(self, staging: torch.Tensor | None) -> None:
        """Units of the buffers to the block, by way of `staging` if there is any."""
        for one in self._copies:
            place = one.parts[self._number] if staging is None else one.staged(staging)
            torch.index_select(one.units, 0, one.index[self._number], out=place)
        if staging is not None:
            self._block.copy_(staging[: self.size_bytes], non_blocking=True)

    def scatter(self, staging: torch.Tensor | None) -> None:
        """The block to units of the buffers, by way of `staging` if there is any."""
        if staging is not None:
            staging[: self.size_bytes].copy_(self._block, non_blocking=True)
        for one in self._copies:
            place = one.parts[self._number] if staging is None else one.staged(staging)
            one.units.index_copy_(0, one.index[self._number], place)

    def checksum(self) -> int:
        """XXH3 64 of the block's bytes."""
        return xxhash.xxh3_64_intdigest(self._block.numpy().data)


@final
class _Run:
    """Blocks of one slab at equal distances: `count` of them, `step` bytes apart.

    Most leases are one run, and a run is cut up in one call where blocks would take one each.
    """

    def __init__(self, block: Block) -> None:
        self.slab = block.slab
        self.first = block.offset
        self.step = 0
        self.count = 1

    def join(self, block: Block) -> bool:
        """Takes the block into the run, if it is the next one."""
        step = block.offset - self.first if self.count == 1 else self.step
        if block.slab is not self.slab or step <= 0:
            return False
        if block.offset != self.first + self.count * step:
            return False
        self.step = step
        self.count += 1
        return True

    def block(self, number: int, size_bytes: int) -> torch.Tensor:
        """The first bytes of one block, uint8 [size_bytes]."""
        start = self.first + number * self.step
        return self.slab[start : start + size_bytes]

    def parts(self, block_offset: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        """What lies at `block_offset` bytes of each block, as `dtype` [block, *shape]."""
        size = dtype.itemsize
        strides = (self.step // size, shape[1], 1)
        start = (self.first + block_offset) // size
        wide = self.slab.view(dtype)
        return wide.as_strided((self.count, *shape), strides, wide.storage_offset() + start)


def _runs_of(blocks: Sequence[Block]) -> list[_Run]:
    runs: list[_Run] = []
    for block in blocks:
        if not runs or not runs[-1].join(block):
            runs.append(_Run(block))
    return runs


def _widest(
    dtypes: Sequence[torch.dtype], numbers: Sequence[int], *tensors: torch.Tensor
) -> torch.dtype:
    """The first of `dtypes` that fits these sizes and places in bytes."""
    places = [*numbers]
    for tensor in tensors:
        places += [tensor.data_ptr(), int(tensor.storage_offset()), tensor.numel()]
    together = reduce(or_, places)
    return next(dtype for dtype in dtypes if together % dtype.itemsize == 0)


def _checking(number: int, chunk: _Chunk, sealed: int) -> Callable[[], int]:
    def check() -> int:
        found = chunk.checksum()
        if found != sealed:
            raise SnapshotDamaged(
                f"chunk {number}: {chunk.size_bytes} bytes with checksum {found:016x}, "
                f"sealed as {sealed:016x}; nothing was restored, so recompute this request"
            )
        return found

    return check


def _nothing() -> int:
    return 0
