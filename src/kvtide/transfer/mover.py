"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import xxhash

from kvtide.device import Block, Job, Step
from kvtide.errors import SnapshotDamaged
from kvtide.layout import Ids
from kvtide.pool import Pool
from kvtide.transfer.plan import Moves, Section, plan_moves, sections_of

# So many views of buffers are kept from move to move; each is some hundred bytes.
_MOST_UNITS = 4096

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
        self._units: dict[tuple[int, int, int], _Units] = {}

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
                copies = self._copies(section, part, run, first)
                chunks += [
                    _Chunk(number, run.block(number, size_bytes), copies)
                    for number in range(run.count)
                ]
        return chunks

    def _copies(
        self, section: Section, part: Sequence[Moves], run: _Run, first: int
    ) -> list[_Copies]:
        """The copies of the chunks in `run`, the first of which is number `first` of `part`."""
        device = self._pool.device
        indices: dict[int, Sequence[torch.Tensor]] = {}
        copies: list[_Copies] = []
        for moves in part:
            if id(moves.units) not in indices:
                units = torch.from_numpy(moves.units)[first : first + run.count]
                indices[id(moves.units)] = device.upload(units).unbind()
            source = self._units_of(section, moves)
            dtype = _widest(device.elements, source.bits | run.bits | moves.block_offset)
            shape = (moves.units.shape[1], source.unit_bytes // dtype.itemsize)
            copies.append(
                _Copies(
                    source.as_type(dtype),
                    indices[id(moves.units)],
                    run.parts(moves.block_offset, dtype, shape),
                    moves.block_offset,
                )
            )
        return copies

    def _units_of(self, section: Section, moves: Moves) -> _Units:
        """A buffer as units of that size; known from the last time, mostly."""
        row_bytes = section.rows[moves.buffer].row_bytes
        form = (
            section.buffers[moves.buffer],
            moves.skip_rows * row_bytes,
            moves.unit_rows * row_bytes,
        )
        if form not in self._units:
            if len(self._units) >= _MOST_UNITS:
                self._units.clear()
            self._units[form] = _Units(self._pool.buffers[form[0]], *form[1:])
        return self._units[form]


@final
@dataclass(frozen=True, slots=True)
class _Copies:
    """What moves between one buffer and the blocks of one run, for each of its chunks."""

    units: torch.Tensor
    """The buffer, as units [unit, element]."""
    index: Sequence[torch.Tensor]
    """Of each chunk the units that move, int64 [unit]."""
    parts: Sequence[torch.Tensor]
    """Of each chunk their place in its block, [unit, element]."""
    block_offset: int
    """In bytes, where that place begins in each block."""

    def staged(self, staging: torch.Tensor) -> torch.Tensor:
        """The place of one chunk's units in `staging`, which is laid out like a block."""
        place, size_bytes = self.parts[0], self.parts[0].nbytes
        part = staging[self.block_offset : self.block_offset + size_bytes]
        return part.view(place.dtype).view(place.shape)


@final
class _Units:
    """A buffer less its first bytes, read as units: rows that adjoin, taken together."""

    def __init__(self, buffer: torch.Tensor, skip_bytes: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        if buffer.dim() == 1:
            buffer = buffer[skip_bytes:]
            buffer = buffer[: buffer.numel() // unit_bytes * unit_bytes].view(-1, unit_bytes)
        self._typed = {torch.uint8: buffer}
        self.bits = unit_bytes | buffer.stride(0) | _bits_of(buffer)

    def as_type(self, dtype: torch.dtype) -> torch.Tensor:
        """The units as [unit, element]."""
        if dtype not in self._typed:
            self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return self._typed[dtype]


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
        self.bits = _bits_of(block.slab) | block.offset
        """See _bits_of."""

    def join(self, block: Block) -> bool:
        """Takes the block into the run, if it is the next one."""
        step = block.offset - self.first if self.count == 1 else self.step
        if block.slab is not self.slab or step <= 0:
            return False
        if block.offset != self.first + self.count * step:
            return False
        self.step = step
        self.bits |= step
        self.count += 1
        return True

    def block(self, number: int, size_bytes: int) -> torch.Tensor:
        """The first bytes of one block, uint8 [size_bytes]."""
        start = self.first + number * self.step
        return self.slab[start : start + size_bytes]

    def parts(
        self, block_offset: int, dtype: torch.dtype, shape: tuple[int, int]
    ) -> Sequence[torch.Tensor]:
        """What lies at `block_offset` bytes of each block, as `dtype` [*shape]."""
        size = dtype.itemsize
        strides = (self.step // size, shape[1], 1)
        start = (self.first + block_offset) // size
        wide = self.slab.view(dtype)
        parts = wide.as_strided((self.count, *shape), strides, wide.storage_offset() + start)
        return parts.unbind()


def _runs_of(blocks: Sequence[Block]) -> list[_Run]:
    runs: list[_Run] = []
    for block in blocks:
        if not runs or not runs[-1].join(block):
            runs.append(_Run(block))
    return runs


def _bits_of(tensor: torch.Tensor) -> int:
    """Its place and size in bytes, or-ed: what divides them all divides this, if a power of two."""
    return tensor.data_ptr() | int(tensor.storage_offset()) | tensor.numel()


def _widest(dtypes: Sequence[torch.dtype], bits: int) -> torch.dtype:
    """The first of `dtypes` that fits sizes and places of these bits."""
    return next(dtype for dtype in dtypes if bits % dtype.itemsize == 0)


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
