"""Chooses the size of a pool's chunks for speed. Each snapshot states the size it has."""

from __future__ import annotations

from kvtide.form import chunk_tokens_for
from kvtide.pool import Pool

_LEAST_CHUNK_BYTES = 1 << 16
# A call costs as much time as copying 10 KiB. A chunk should have many times that of each buffer.
_BUFFER_SHARE_BYTES = 256 << 10
_LARGEST_SHARES_BYTES = 16 << 20


def chunk_bytes_for(pool: Pool, limit_bytes: int) -> int:
    """The size of a chunk, in bytes, and of a block of the arena, whose limit is `limit_bytes`.

    It is the size that the device moves best, or larger if the pool has many buffers, since each
    buffer needs a call for each chunk. A 16th is added, so that values of a power of two fit as
    many times with their scales as without. In a small arena it is at most a 16th of the limit,
    because a request takes whole blocks. It is never smaller than the largest row.
    """
    geometry = pool.geometry
    shares = min(len(pool.buffers) * _BUFFER_SHARE_BYTES, _LARGEST_SHARES_BYTES)
    wanted = max(pool.device.chunk_bytes, shares) * 17 // 16
    chunk_bytes = min(wanted, max(_LEAST_CHUNK_BYTES, limit_bytes // 16))
    token_bytes = max(1, geometry.token_bytes)
    largest_row = max(plane.row_bytes for plane in geometry.planes)
    return max(chunk_tokens_for(geometry, chunk_bytes) * token_bytes, largest_row)
