"""Reads and writes whole files: past the system's cache where memory and file system allow it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from kvtide.tier.file_form import ALIGNMENT

# The system splits a call of this size into requests that the disk serves side by side.
_CALL_BYTES = 16 << 20
_CALL_PARTS = 512


def aligned_memory(size_bytes: int) -> memoryview:
    """Zeroed memory that begins at a multiple of ALIGNMENT, at least `size_bytes` of it."""
    return memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]


def are_aligned(parts: Sequence[memoryview]) -> bool:
    """Whether direct I/O takes these parts: addresses and sizes are multiples of ALIGNMENT."""
    return all(
        part.nbytes % ALIGNMENT == 0 and _address_of(part) % ALIGNMENT == 0 for part in parts
    )


def takes_direct_io(folder: int, name: str) -> bool:
    """Whether files in `folder` can be written and read past the system's cache: tries it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    page, again = aligned_memory(ALIGNMENT), aligned_memory(ALIGNMENT)
    page[:] = bytes(range(256)) * (ALIGNMENT // 256)
    try:
        file = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            counts = os.pwritev(file, [page], 0), os.preadv(file, [again], 0)
            return counts == (ALIGNMENT, ALIGNMENT) and page == again
        finally:
            os.close(file)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


@contextmanager
def through_cache_unless_aligned(file: int, parts: Sequence[memoryview]) -> Iterator[None]:
    """Within, a file that was opened for direct I/O is read through the cache if need be."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if are_aligned(parts) or not flags & os.O_DIRECT:
        yield
        return
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


def write_all(file: int, parts: Sequence[memoryview]) -> None:
    """Writes `parts` from the beginning of a file on. Raises OSError if not all are taken."""
    place = 0
    for batch in batches(parts):
        place = _move(os.pwritev, file, batch, place)


def read_all(file: int, place: int, parts: Sequence[memoryview]) -> int:
    """Fills `parts` with a file's bytes from byte `place` on; returns the byte behind the last.

    Raises EOFError if the file ends before.
    """
    for batch in batches(parts):
        place = _move(os.preadv, file, batch, place)
    return place


def _move(call: object, file: int, parts: list[memoryview], place: int) -> int:
    """One batch by as many calls as it takes: a call may move less than it was asked to."""
    while parts:
        count = call(file, parts, place)  # type: ignore[operator]
        if count <= 0:
            if call is os.preadv:
                raise EOFError(f"the file ends at byte {place}")
            raise OSError(errno.EIO, "the file takes no more bytes")
        place += count
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][count:]
    return place


def batches(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The parts, some at a time; long ones are cut."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        for first in range(0, part.nbytes, _CALL_BYTES):
            some = part[first : first + _CALL_BYTES]
            if batch and (size + some.nbytes > _CALL_BYTES or len(batch) == _CALL_PARTS):
                yield batch
                batch, size = [], 0
            batch.append(some)
            size += some.nbytes
    if batch:
        yield batch


def _address_of(part: memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).__array_interface__["data"][0]) if part.nbytes else 0
