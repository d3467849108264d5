"""How much host memory an arena may take of this machine, and in blocks of which size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvtide.pool import Pool
from kvtide.transfer import chunk_tokens_for

_LEAST_CHUNK_BYTES = 1 << 16
# A call costs what it takes to copy 50 KiB: a chunk should have several times that of each buffer.
_BUFFER_SHARE_BYTES = 256 << 10
_LARGEST_SHARES_BYTES = 16 << 20
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def block_bytes_for(pool: Pool, limit_bytes: int) -> int:
    """The size of the arena's blocks, which is also that of a chunk.

    What the device moves best at once, and more where the pool is in many buffers, each of which
    takes a call of its own for every chunk. But no more than a 16th of a small arena: a request
    takes whole blocks of it. Never less than the largest row, which moves whole.
    """
    geometry = pool.geometry
    shares = min(len(pool.buffers) * _BUFFER_SHARE_BYTES, _LARGEST_SHARES_BYTES)
    wanted = max(pool.device.chunk_bytes, shares)
    chunk_bytes = min(wanted, max(_LEAST_CHUNK_BYTES, limit_bytes // 16))
    token_bytes = max(1, geometry.token_bytes)
    largest_row = max(plane.row_bytes for plane in geometry.planes)
    return max(chunk_tokens_for(geometry, chunk_bytes) * token_bytes, largest_row)


def default_host_bytes(pool_bytes: int) -> int:
    """The arena's limit where none was asked for: a quarter of what the pool leaves free.

    The pool counts in full, though the system gives its memory only as it is written.
    """
    return max(0, free_memory_bytes() - pool_bytes) // 4


def free_memory_bytes() -> int:
    """What the system, and the container, can give without swapping: caches count as free."""
    return min([_free_system_bytes(), *_free_container_bytes()])


def _free_container_bytes() -> Iterator[int]:
    """What control group v2 leaves, if there is one with a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        yield max(0, limit - int((_CONTROL_GROUP / "memory.current").read_text()))


def _free_system_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration), Path("/proc/meminfo").open() as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
