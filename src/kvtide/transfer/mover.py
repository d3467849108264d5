"""Mover: the only place that issues copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        """Everything that the lanes need, so that all they do is copy.

        Each call from Python that a lane makes beside another one is a wait for the
        interpreter's lock, so tensors are cut up here, in as few calls as will do.
        """
        token_bytes = self._pool.geometry.token_bytes
        chunks: list[_Chunk] = []
        for part in plan_moves(self._pool.buffer_rows, slots, chunk_tokens, _MOVE_BYTES):
            first = len(chunks)
            size_bytes = min(chunk_tokens, slots.size - first * chunk_tokens) * token_bytes
            here = blocks[first : first + len(part[0].units)]
            columns = [self._copies(moves, here) for moves in part]
            data = [block.bytes_view(size_bytes) for block in here]
            chunks += map(_Chunk, data, zip(*columns, strict=True))
        assert len(chunks) == len(blocks), "one block a chunk"
        return chunks

    def _copies(self, moves: Moves, blocks: Sequence[Block]) -> Iterator[_Copy]:
        """One copy for each chunk."""
        row_bytes = self._pool.buffer_rows[moves.buffer].row_bytes
        unit_bytes = moves.unit_rows * row_bytes
        buffer = self._pool.buffers[moves.buffer][moves.skip_rows * row_bytes :]
        buffer = buffer[: buffer.numel() // unit_bytes * unit_bytes]
        offsets = [block.offset + moves.block_offset for block in blocks]
        slabs = {id(block.slab): block.slab for block in blocks}
        dtype = _widest(unit_bytes, offsets, buffer, *slabs.values())
        wide = {number: slab.view(dtype) for number, slab in slabs.items()}
        width = unit_bytes // dtype.itemsize
        units = buffer.view(dtype).view(-1, width)
        shape, strides = (moves.units.shape[1], width), (width, 1)
        indices = torch.from_numpy(moves.units).unbind(0)
        for index, block, offset in zip(indices, blocks, offsets, strict=True):
            part = wide[id(block.slab)].as_strided(shape, strides, offset // dtype.itemsize)
            yield units, index, part


_Copy = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The buffer as units, the index of those that move, their bytes in the block."""


@final
class _Chunk:
    def __init__(self, data: memoryview, copies: Sequence[_Copy]) -> None:
        self.data = data
        self.copies = copies


def _gathering(chunk: _Chunk, seal: bool) -> Callable[[], int]:
    def gather() -> int:
        for units, index, part in chunk.copies:
            torch.index_select(units, 0, index, out=part)
        return _checksum(chunk.data) if seal else 0

    return gather


def _scattering(chunk: _Chunk) -> Callable[[], int]:
    def scatter() -> int:
        for units, index, part in chunk.copies:
            units.index_copy_(0, index, part)
        return 0

    return scatter


def _widest(unit_bytes: int, offsets: Sequence[int], *tensors: torch.Tensor) -> torch.dtype:
    """The widest element in which these bytes can be moved: 16, 8 or 1 bytes."""
    places = [unit_bytes, *offsets]
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
