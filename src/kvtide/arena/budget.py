"""How much host memory an arena may take of this machine."""

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
# By the controller's name, which is empty for control groups v2, and `memory` for v1: the file of a
# group's limit, the file of what it has taken, and a prefix. With that prefix begin the lines of
# memory.stat that count the groups below it as well.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
# The caches of files. They leave out shared memory, which counts as memory without a file, and
# locked pages.
_CACHES = ("active_file", "inactive_file")
# The part of the caches that has to be written before it is free: v2's names, then v1's.
_UNWRITTEN = ("file_dirty", "file_writeback", "dirty", "writeback")
_PAGES_AT_ONCE = 1 << 18


def default_host_bytes(untouched_bytes: int, free_bytes: int | None = None) -> int:
    """The arena's limit where none was asked for: a quarter of what the pool leaves free.

    The system gives a pool its memory only when somebody writes to it. `untouched_bytes` is what
    it has yet to give: it still counts as free, but is the pool's. `free_bytes` is what is free; if
    not given, it is measured here.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return max(0, free - untouched_bytes) // 4


def untouched_bytes_of(buffers: Sequence[torch.Tensor]) -> int:
    """How much memory the host has yet to give as a pool's buffers are written.

    Buffers on a device take no host memory. The system says of each whole page whether it gave it.
    Where it can't be asked, all bytes count as untouched: then a budget may be too small.
    """
    storages = [buffer.untyped_storage() for buffer in buffers if buffer.is_cpu]
    distinct = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(
        max(0, size_bytes - _resident_bytes(address, size_bytes))
        for address, size_bytes in distinct.items()
    )


def _resident_bytes(address: int, size_bytes: int) -> int:
    """How much of this range lies in pages that have memory; at each end up to a page too much."""
    # Some systems say that every page has memory, even a page that nobody has touched.
    with mmap.mmap(-1, mmap.PAGESIZE) as fresh:
        untouched = ctypes.addressof(probe := ctypes.c_char.from_buffer(fresh))
        can_tell = _count_resident(untouched, mmap.PAGESIZE) == 0
        del probe  # a map that somebody looks into can't be closed
    return _count_resident(address, size_bytes) * mmap.PAGESIZE if can_tell else 0


def _count_resident(address: int, size_bytes: int) -> int:
    """How many pages of a range have memory; 0 where the system doesn't say."""
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
    """What the system, and the container, can give without swapping: caches count as free."""
    return min([_free_system_bytes(), *_free_container_bytes()])


def _free_container_bytes() -> Iterator[int]:
    """What each control group that this process is in leaves, if it has a limit.

    Without one v2 says `max`; v1 says about 2**63, which is never the least.
    """
    for folder, limit_file, used_file, prefix in _own_groups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            yield max(0, limit - max(0, used - _cache_bytes(folder, prefix)))


def _cache_bytes(folder: Path, prefix: str) -> int:
    """What a group has taken of files that were read: the system takes it back when asked for more.

    For example a file of weights: it counts as taken, but the group may still use that memory.
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
    """The group's folder and all above it, up to the mount, with what to read there.

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
