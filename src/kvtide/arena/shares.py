"""Divides the limit of host memory: most of it is blocks, the rest is what stands beside them.

    blocks    the bytes of requests
    moves     row numbers of the largest move: the move of a request that fills all blocks
    seals     a 32nd, for what each snapshot needs beside its bytes, wherever these are
    tiers     a 32nd, for headers and for the ends of chunks while tiers write and read them

Staging isn't in here: it is memory of the device, as much as two chunks. Pinned memory comes in
powers of two, and what that wastes is within the limit, too.
"""

from __future__ import annotations

from kvtide.arena.host import HostArena, slab_count_of
from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.integers import checked_integer
from kvtide.layout import Geometry
from kvtide.pool import Pool
from kvtide.transfer import chunk_bytes_for

_SHARE = 32
_LEAST_SHARED = 64 << 20
_LEAST_SEALS = 4 << 20
_MOST_OF_MOVES = 4
_TOKEN_BYTES = 64
_ROW_BYTES = 8
_PLANNED_BYTES = 10 << 20
"""The most that the numbers of rows take, since a large move is planned in parts."""


def arena_for(pool: Pool, limit_bytes: int) -> HostArena:
    """An arena for a pool's requests, all of whose memory in the process is within `limit_bytes`.

    Blocks have the size that the pool's device moves best. A limit of less than 64 MiB, such as a
    test's, is all blocks, and up to 4 MiB of seals stand beside them: the interpreter takes and
    gives back as much for anything. Raises LayoutError for an invalid limit.
    """
    limit_bytes = checked_integer(
        limit_bytes, "host arena: limit_bytes", least=0, error=LayoutError
    )
    share_bytes = limit_bytes // _SHARE if limit_bytes >= _LEAST_SHARED else 0
    left_bytes = limit_bytes - 2 * share_bytes
    block_bytes = chunk_bytes_for(pool, left_bytes)
    moves_bytes = _moves_bytes(pool.geometry, left_bytes) if share_bytes else 0
    blocks_bytes = left_bytes - moves_bytes
    if share_bytes and pool.device.torch_device.type != "cpu":
        blocks_bytes = _pinned_count(blocks_bytes, block_bytes) * block_bytes
    return HostArena(
        pool.device,
        limit_bytes=limit_bytes,
        block_bytes=block_bytes,
        beside_bytes=limit_bytes - blocks_bytes,
        seal_bytes=max(share_bytes, _LEAST_SEALS),
    )


def arena_of_blocks(
    device: Device, limit_bytes: int, *, block_bytes: int, beside_bytes: int
) -> HostArena:
    """An arena for snapshots of one block each, each of which takes `beside_bytes` beside it.

    All of both are within `limit_bytes`; less than 64 MiB is all blocks, as above. Raises
    LayoutError for an invalid limit.
    """
    limit_bytes = checked_integer(
        limit_bytes, "host arena: limit_bytes", least=0, error=LayoutError
    )
    if limit_bytes < _LEAST_SHARED:
        return HostArena(device, limit_bytes=limit_bytes, block_bytes=block_bytes)
    count = limit_bytes // (block_bytes + beside_bytes)
    if device.torch_device.type != "cpu":
        count = _pinned_count(limit_bytes - count * beside_bytes, block_bytes)
    return HostArena(
        device,
        limit_bytes=limit_bytes,
        block_bytes=block_bytes,
        beside_bytes=limit_bytes - count * block_bytes,
    )


def _pinned_count(size_bytes: int, block_bytes: int) -> int:
    """How many blocks fit into `size_bytes` of pinned memory.

    torch takes pinned memory from the system in powers of two, also where less is asked for
    (ATen/core/CachingHostAllocator.h).
    """
    slab_count = slab_count_of(block_bytes)
    slabs, left_bytes = divmod(size_bytes, _power_of_two(slab_count * block_bytes))
    rest = (
        count for count in range(slab_count) if _power_of_two(count * block_bytes) <= left_bytes
    )
    return slabs * slab_count + max(rest, default=0)


def _power_of_two(size_bytes: int) -> int:
    """The least power of two that isn't smaller; 0 for 0."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def _moves_bytes(geometry: Geometry, size_bytes: int) -> int:
    """The most memory that a move takes beside blocks of `size_bytes` together.

    Only a layout of less than 400 bytes a token, such as a test's, needs more than a quarter, and
    doesn't get it.
    """
    if not geometry.token_bytes:
        return 0
    token_count = size_bytes // geometry.token_bytes
    layer_count = sum(plane.layer_count for plane in geometry.planes)
    planned_bytes = min(token_count * layer_count * _ROW_BYTES, _PLANNED_BYTES)
    return min(planned_bytes + token_count * _TOKEN_BYTES, size_bytes // _MOST_OF_MOVES)
