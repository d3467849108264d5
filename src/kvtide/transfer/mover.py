"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import final

import torch
import xxhash

from kvtide.device import Block, Job
from kvtide.errors import SnapshotDamaged
from kvtide.pool import Pool
from kvtide.transfer.plan import Moves, Slots, plan_moves

# torch runs an operation of up to 32,768 elements (at::internal::GRAIN_SIZE) on the calling
# thread alone. Moves of that many 16-byte elements stay within their lane.
_MOVE_BYTES = 32_768 * 16


@final
class Mover:
    """Copies tokens between a pool's slots and host blocks, a chunk of tokens a block.

    All copying is of bytes, in elements as wide as alignment allows, so every dtype moves,
    NaN payloads included. Slots come checked (`checked_slots`); a block is uint8
    [block_bytes], of which a chunk fills the beginning. Both ways return at once.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def gather(
        self,
        slots: Slots,
        blocks: Sequence[Block],
        *,
        chunk_tokens: int,
        seal: bool = True,
    ) -> Job[list[int]]:
        """Slots to blocks. The job's results are the chunks' checksums (zeros without `seal`).

        The blocks belong to the job until it has ended, and the slots must not be written.
        """
        chunks = self._chunks(slots, blocks, chunk_tokens)
        return self._pool.device.submit([_gathering(chunk, seal) for chunk in chunks])

    def scatter(
        self,
        blocks: Sequence[Block],
        slots: Slots,
        *,
        chunk_tokens: int,
        checksums: Sequence[int] | None,
    ) -> Job[list[int]]:
        """Blocks to slots, after all blocks have been found to be as they were sealed.

        The job raises SnapshotDamaged, naming the first bad chunk, before anything is written.
        With None for checksums nothing is checked: for benchmarks. The blocks and the slots
        belong to the job until it has ended.
        """
        chunks = self._chunks(slots, blocks, chunk_tokens)
        scattering = [_scattering(chunk) for chunk in chunks]
        if checksums is None:
            return self._pool.device.submit(scattering)
        sealed = zip(chunks, checksums, strict=True)
        checking = [_checking(i, chunk, checksum) for i, (chunk, checksum) in enumerate(sealed)]
        return self._pool.device.submit(checking, scattering)

    def _chunks(self, slots: Slots, blocks: Sequence[Block], chunk_tokens: int) -> list[_Chunk]:
        """What the lanes need. A call from Python in one lane is a wait for the interpreter's
        lock in the other, so all that can be done once for all chunks is done here."""
        token_bytes = self._pool.geometry.token_bytes
        chunks: list[_Chunk] = []
        for part in plan_moves(self._pool.buffer_rows, slots, chunk_tokens, _MOVE_BYTES):
            size_bytes = min(chunk_tokens, slots.size - len(chunks) * chunk_tokens) * token_bytes
            stop = len(chunks) + len(part[0].units)
            for run in _runs_of(blocks[len(chunks) : stop]):
                first = len(chunks) - stop + len(part[0].units)
                copies = [self._copies(moves, run, first) for moves in part]
                views = run.bytes_views(size_bytes)
                chunks += [_Chunk(view, number, copies) for number, view in enumerate(views)]
        assert len(chunks) == len(blocks), "one block a chunk"
        return chunks

    def _copies(self, moves: Moves, run: _Run, first: int) -> _Copies:
        """The copies of the chunks in `run`, the first of which is number `first` of `moves`."""
        row_bytes = self._pool.buffer_rows[moves.buffer].row_bytes
        unit_bytes = moves.unit_rows * row_bytes
        buffer = self._pool.buffers[moves.buffer][moves.skip_rows * row_bytes :]
        buffer = buffer[: buffer.numel() // unit_bytes * unit_bytes]
        sizes = [unit_bytes, moves.block_offset, run.first, run.step]
        dtype = _widest(sizes, buffer, run.slab)
        width = unit_bytes // dtype.itemsize
        return (
            buffer.view(dtype).view(-1, width),
            torch.from_numpy(moves.units)[first : first + run.count],
            run.parts(moves.block_offset, dtype, (moves.units.shape[1], width)),
        )


_Copies = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The buffer as units [unit, element]; of each chunk in a run the index of the units that move
[chunk, unit], and their place in its block [chunk, unit, element]."""


@final
class _Chunk:
    """One chunk: its bytes in the block, and its number in the run that `copies` are of."""

    def __init__(self, data: memoryview, number: int, copies: Sequence[_Copies]) -> None:
        self.data = data
        self._number = number
        self._copies = copies

    def gather(self) -> None:
        """Units of the buffers to the block."""
        for units, index, parts in self._copies:
            torch.index_select(units, 0, index[self._number], out=parts[self._number])

    def scatter(self) -> None:
        """The block to units of the buffers."""
        for units, index, parts in self._copies:
            units.index_copy_(0, index[self._number], parts[self._number])


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

    def bytes_views(self, size_bytes: int) -> list[memoryview]:
        """The first bytes of each block."""
        memory = self.slab.numpy().data
        starts = [self.first + number * self.step for number in range(self.count)]
        return [memory[start : start + size_bytes] for start in starts]

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


def _gathering(chunk: _Chunk, seal: bool) -> Callable[[], int]:
    def gather() -> int:
        chunk.gather()
        return _checksum(chunk.data) if seal else 0

    return gather


def _scattering(chunk: _Chunk) -> Callable[[], int]:
    def scatter() -> int:
        chunk.scatter()
        return 0

    return scatter


def _widest(numbers: Sequence[int], *tensors: torch.Tensor) -> torch.dtype:
    """The widest element, of 16, 8 or 1 bytes, that fits these sizes and places in bytes."""
    places = [*numbers]
    for tensor in tensors:
        places += [tensor.data_ptr(), int(tensor.storage_offset()), tensor.numel()]
    together = reduce(or_, places)
    for dtype in (torch.complex128, torch.int64):
        if together % dtype.itemsize == 0:
            return dtype
    return torch.uint8


def _checking(number: int, chunk: _Chunk, sealed: int) -> Callable[[], int]:
    def check() -> int:
        found = _checksum(chunk.data)
        if found != sealed:
            raise SnapshotDamaged(
                f"chunk {number}: {len(chunk.data)} bytes with checksum {found:016x}, "
                f"sealed as {sealed:016x}; nothing was restored, so recompute this request"
            )
        return found

    return check


def _checksum(data: memoryview) -> int:
    """XXH3 64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data)
