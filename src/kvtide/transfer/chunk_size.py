"""How large the chunks of a pool should be: a matter of speed. A snapshot states its own size."""

from __future__ import annotations

from kvtide.form import chunk_tokens_for
from kvtide.pool import Pool

_LEAST_CHUNK_BYTES = 1 << 16
# A call takes as long as copying 10 KiB, so a chunk should have many times that of each buffer.
_BUFFER_SHARE_BYTES = 256 << 10
_LARGEST_SHARES_BYTES = 16 << 20


def chunk_bytes_for(pool: Pool, limit_bytes: int) -> int:
    """The size of a chunk, in bytes, and of a block of the arena, whose limit is `limit_bytes`.

    It is what the device moves best at once. It is more where the pool is in many buffers, since
    each of them takes a call of its own for every chunk. Up to a 16th is added, so that with scales
    beside the values as many tokens fit as without. But it is no more than a 16th of a small arena,
    since a request takes whole blocks of it. It is never less than the largest row.
    """
    geometry = pool.geometry
    shares = min(len(pool.buffers) * _BUFFER_SHARE_BYTES, _LARGEST_SHARES_BYTES)
    wanted = max(pool.device.chunk_bytes, shares) * 17 // 16
    chunk_bytes = min(wanted, max(_LEAST_CHUNK_BYTES, limit_bytes // 16))
    token_bytes = max(1, geometry.token_bytes)
    largest_row = max(plane.row_bytes for plane in geometry.planes)
    return max(chunk_tokens_for(geometry, chunk_bytes) * token_bytes, largest_row)
