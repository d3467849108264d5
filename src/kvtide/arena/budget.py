"""Computes how much host memory an arena may use on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import torch

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# For control groups v2 (mounted without a name) and v1 (`memory`): the files with a group's limit
# and with its usage, and the prefix of lines in memory.stat that include the groups below it.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
# These lines count the caches of files. They count neither shared memory nor locked pages.
_CACHES = ("active_file", "inactive_file")
# These lines count the cached bytes that must be written to disk first: names of v2, then of v1.
_UNWRITTEN = ("file_dirty", "file_writeback", "dirty", "writeback")
_PAGES_AT_ONCE = 1 << 18


def default_host_bytes(untouched_bytes: int, free_bytes: int | None = None) -> int:
    """The default limit of an arena: a quarter of the memory that is free beside the pool.

    The system allocates a pool's memory only when it is written. `untouched_bytes` of the pool are
    not allocated yet, so they are still counted as free. `free_bytes` is this machine's free
    memory by default.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return max(0, free - untouched_bytes) // 4


def untouched_bytes_of(buffers: Sequence[torch.Tensor]) -> int:
    """How much host memory the system will allocate when a pool's buffers are written.

    Buffers on a device need none. The system tells for whole pages whether they are allocated. If
    it can't tell, all bytes count as untouched, so that the budget is too small rather than too
    large.
    """
    storages = [buffer.untyped_storage() for buffer in buffers if buffer.is_cpu]
    distinct = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(
        max(0, size_bytes - _resident_bytes(address, size_bytes))
        for address, size_bytes in distinct.items()
    )


def _resident_bytes(address: int, size_bytes: int) -> int:
    """Bytes of this range that are allocated, in whole pages, so up to two pages too many."""
    # Some systems say that every page is allocated, even an untouched one.
    with mmap.mmap(-1, mmap.PAGESIZE) as fresh:
        untouched = ctypes.addressof(probe := ctypes.c_char.from_buffer(fresh))
        can_tell = _count_resident(untouched, mmap.PAGESIZE) == 0
        del probe  # a map can't be closed while an object refers to its memory
    return _count_resident(address, size_bytes) * mmap.PAGESIZE if can_tell else 0


def _count_resident(address: int, size_bytes: int) -> int:
    """How many pages of a range the system has allocated; 0 if it can't tell."""
    try:
        mincore = ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):
        return 0
    first, last = address // mmap.PAGESIZE, -(-(address + size_bytes) // mmap.PAGESIZE)
    found = 0
    for start in range(first, last, _PAGES_AT_ONCE):
        flags = torch.zeros(min(_PAGES_AT_ONCE, last - start), dtype=torch.uint8)
        failed = mincore(
            ctypes.c_void_p(start * mmap.PAGESIZE),
            ctypes.c_size_t(len(flags) * mmap.PAGESIZE),
            ctypes.c_void_p(flags.data_ptr()),
        )
        if failed:
            return 0
        found += int((flags & 1).sum())
    return found


def free_memory_bytes() -> int:
    """The memory that the system and the container can give without swapping, caches included."""
    return min([_free_system_bytes(), *_free_container_bytes()])


def _free_container_bytes() -> Iterator[int]:
    """The free memory of each control group of this process that has a limit.

    A group without a limit has `max` in v2, and about 2**63 in v1, which is never the least.
    """
    for folder, limit_file, used_file, prefix in _own_groups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            yield max(0, limit - max(0, used - _cache_bytes(folder, prefix)))


def _cache_bytes(folder: Path, prefix: str) -> int:
    """Bytes of a group's usage that are caches of files, which the system frees on demand.

    They include a file of weights that was read.
    """
    lines: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            lines[name] = int(value)
    caches, unwritten = (
        sum(lines.get(prefix + name, 0) for name in names) for names in (_CACHES, _UNWRITTEN)
    )
    return max(0, caches - unwritten)


def _own_groups() -> Iterator[tuple[Path, str, str, str]]:
    """The folders of this process's groups and of all groups above, with the files to read there.

    In a container the mount may be the group itself, whatever path the system gives. Then the path
    below the mount doesn't exist.
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
