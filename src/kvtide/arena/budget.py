"""How much host memory an arena may take of this machine, and in blocks of which size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvtide.pool import Pool
from kvtide.transfer import chunk_tokens_for

_LEAST_CHUNK_BYTES = 1 << 16
# A call costs what it takes to copy 10 KiB: a chunk should have many times that of each buffer.
_BUFFER_SHARE_BYTES = 256 << 10
_LARGEST_SHARES_BYTES = 16 << 20
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# Of control groups v2, which have no name there, and of v1: a group's limit, and what it has taken.
_GROUP_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def block_bytes_for(pool: Pool, limit_bytes: int) -> int:
    """The size of the arena's blocks, which is also that of a chunk.

    What the device moves best at once, and more where the pool is in many buffers, each of which
    takes a call of its own for every chunk; up to a 16th more, so that where scales lie beside
    values of a power of two as many tokens fit as without. But no more than a 16th of a small
    arena: a request takes whole blocks of it. Never less than the largest row, which moves whole.
    """
    geometry = pool.geometry
    shares = min(len(pool.buffers) * _BUFFER_SHARE_BYTES, _LARGEST_SHARES_BYTES)
    wanted = max(pool.device.chunk_bytes, shares) * 17 // 16
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
    """What each control group that this process is in leaves, if it has a limit.

    Without one v2 says `max`; v1 says about 2**63, which is never the least.
    """
    for folder, limit_file, used_file in _own_groups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            yield max(0, limit - int((folder / used_file).read_text()))


def _own_groups() -> Iterator[tuple[Path, str, str]]:
    """The group's folder and all above it, up to the mount, with the names of the two files.

    In a container the mount may be the group itself, whatever path the system gives: then there is
    nothing below it.
    """
    paths = dict.fromkeys(_GROUP_FILES, "/")
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths.update({name: path for name in controllers.split(",") if name in paths})
    for name, path in paths.items():
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield _CONTROL_GROUP / name / group, *_GROUP_FILES[name]


def _free_system_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration), Path("/proc/meminfo").open() as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
