"""DiskTier: keeps snapshots as files in a folder, within a limit of bytes.

    put     reserve bytes, others leave if need be → write and sync a draft → give it its name
    get     read the header and check it → make room → read and check each chunk

What is in the folder is found again at the next start. The index is in memory; a file that vanishes
is a miss.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from kvtide.errors import LayoutError, SnapshotDamaged, SnapshotMiss, TierFull, TierRetry
from kvtide.integers import checked_integer
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier.base import Tier
from kvtide.tier.file_form import (
    ALIGNMENT,
    LARGEST_HEADER,
    FileForm,
    damaged,
    file_form_of,
    header_bytes_of,
    padded,
    read_header,
)
from kvtide.tier.file_io import aligned_memory, read_all, through_cache_unless_aligned
from kvtide.tier.folder import Folder


@final
@dataclass(frozen=True, slots=True)
class DiskStats:
    """What the tier has, and counts since it was opened."""

    snapshots: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    limit_bytes: int = 0
    damaged: int = 0
    evicted: int = 0


class _File:
    """A file of the index. While `readers` isn't 0 it doesn't leave for others."""

    __slots__ = ("readers", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.readers = 0


@final
class DiskTier(Tier):
    """Snapshots in files of `folder`, together never more than `limit_bytes`.

    What was used least recently leaves for others. Files that are being written count, and so do
    damaged files, which were moved aside and leave first. Blocks count as whole pages of 4,096
    bytes; what the file system needs for itself doesn't count.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Locks the folder, makes it if it isn't there, and finds what it has.

        Raises UsageError if another process uses it or it can't be used, LayoutError for an invalid
        limit. Files that don't fit into the limit any more are removed.
        """
        self._limit_bytes = checked_integer(
            limit_bytes, "disk tier: limit_bytes", least=0, error=LayoutError
        )
        self._change = threading.Lock()  # held for changes of the index, and never for long
        self._is_lost = False
        self._folder = Folder(folder)
        self._damaged = self._evicted = self._peak_bytes = 0
        try:
            self._find()
        except BaseException:
            self._folder.close()
            raise

    @property
    def stats(self) -> DiskStats:
        """What the tier has, and its counts."""
        return DiskStats(
            len(self._entries),
            self._used_bytes,
            self._peak_bytes,
            self._limit_bytes,
            self._damaged,
            self._evicted,
        )

    def contains(self, key: str) -> bool:
        """See Tier."""
        return _name_of(key) in self._entries

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        form = file_form_of(key, seal)
        if len(form.header) > LARGEST_HEADER:
            raise TierFull(
                f"disk tier: a header of {len(form.header)} bytes is too long for a file"
            )
        name = _name_of(key)
        with self._retrying(), self._reserved(form.size_bytes):
            draft = self._folder.write(name, _parts_of(form, chunks))
            try:
                with self._change:
                    self._folder.publish(draft)
                    self._drop(name)
                    self._entries[name] = _File(form.size_bytes)
                    self._used_bytes += form.size_bytes
            finally:
                self._folder.settle(draft)

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        name = _name_of(key)
        with self._retrying(), self._reading(name) as entry:
            try:
                with self._folder.open(name) as file:
                    with self._moving_aside(name, entry):
                        seal, form = _read_seal(file, key)
                    chunks = make_room(seal)
                    with self._moving_aside(name, entry):
                        _read_chunks(file, form, seal, chunks)
                    os.utime(file)  # the order of leaving, for the next start
                    return seal
            except FileNotFoundError:
                self._forget(name, entry)
        raise SnapshotMiss(f"the disk tier has no snapshot {key!r}; recompute this request")

    def remove(self, key: str) -> None:
        """See Tier."""
        name = _name_of(key)
        with self._retrying(), self._change:
            if name in self._entries:
                self._folder.remove(name)
                self._drop(name)

    def close(self) -> None:
        """Gives the folder's lock back. Repeatable."""
        self._folder.close()
        self._is_lost = True

    # ---- the index ---------------------------------------------------------------------

    def _find(self) -> None:
        """Makes the index from the folder, the least recently used file first."""
        found = sorted(self._folder.entries(), key=lambda entry: entry.used_at)
        self._entries = {entry.name: _File(padded(entry.size_bytes)) for entry in found}
        aside = sorted(self._folder.entries_aside(), key=lambda entry: entry.used_at)
        self._aside = {entry.name: padded(entry.size_bytes) for entry in aside}
        self._used_bytes = sum(entry.size_bytes for entry in self._entries.values())
        self._used_bytes += sum(self._aside.values())
        while self._used_bytes > self._limit_bytes and self._evict():
            pass
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)

    def _drop(self, name: str) -> None:
        """Takes a name from the index, and its bytes from those in use."""
        entry = self._entries.pop(name, None)
        self._used_bytes -= entry.size_bytes if entry else 0

    def _evict(self) -> bool:
        """Removes a damaged file or the least recently used file; False if none may leave."""
        for aside in self._aside:
            self._folder.remove_aside(aside)
            self._used_bytes -= self._aside.pop(aside)
            return True
        for name, entry in self._entries.items():
            if not entry.readers:
                self._folder.remove(name)
                self._drop(name)
                self._evicted += 1
                return True
        return False

    @contextmanager
    def _reserved(self, size_bytes: int) -> Iterator[None]:
        """Within, `size_bytes` count as used: others leave first. Raises TierFull."""
        with self._change:
            if size_bytes <= self._limit_bytes:
                while self._used_bytes + size_bytes > self._limit_bytes and self._evict():
                    pass
            if self._used_bytes + size_bytes > self._limit_bytes:
                raise TierFull(
                    f"disk tier: {size_bytes} bytes asked for, {self._used_bytes} of "
                    f"{self._limit_bytes} in use; raise the limit, or recompute this request"
                )
            self._used_bytes += size_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        try:
            yield
        finally:
            with self._change:
                self._used_bytes -= size_bytes

    @contextmanager
    def _reading(self, name: str) -> Iterator[_File | None]:
        """Within, the file doesn't leave for others; it counts as the one used last."""
        with self._change:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._entries[name] = entry
                entry.readers += 1
        try:
            yield entry
        finally:
            with self._change:
                if entry is not None:
                    entry.readers -= 1

    def _forget(self, name: str, entry: _File | None) -> None:
        """The file has vanished; a newer one of the same name stays."""
        with self._change:
            if entry is not None and self._entries.get(name) is entry:
                self._drop(name)

    @contextmanager
    def _moving_aside(self, name: str, entry: _File | None) -> Iterator[None]:
        """Keeps a damaged file for whoever looks into it, out of the way of later reads.

        So it does with a file of another version. A newer file of the same name stays.
        """
        try:
            yield
        except (SnapshotDamaged, SnapshotMiss):
            with self._change:
                self._damaged += 1
                if entry is not None and self._entries.get(name) is entry:
                    self._aside[self._folder.move_aside(name)] = entry.size_bytes
                    del self._entries[name]
            raise

    @contextmanager
    def _retrying(self) -> Iterator[None]:
        """Raises TierRetry for what the disk refuses. Opens the folder again if it was away."""
        try:
            if self._is_lost:
                with self._change:
                    self._folder.reopen()
                    self._find()
                    self._is_lost = False
            yield
        except OSError as error:
            self._is_lost = not self._folder.is_there()
            raise TierRetry(f"disk tier: {self._folder.path}: {error.strerror or error}") from error


def _name_of(key: str) -> str:
    """A file's name: a hash, since a key is hostile."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _parts_of(form: FileForm, chunks: Sequence[memoryview]) -> list[memoryview]:
    """The file's contents in order. Chunks aren't copied, except for the end of each."""
    parts = [_aligned(form.header)]
    for chunk in chunks:
        whole = chunk.nbytes // ALIGNMENT * ALIGNMENT
        parts += [chunk[:whole]] if whole else []
        parts += [_aligned(chunk[whole:])] if whole < chunk.nbytes else []
    return parts


def _aligned(content: bytes | memoryview) -> memoryview:
    """A copy in memory for direct I/O, with zeros behind it."""
    memory = aligned_memory(padded(len(content)))
    memory[: len(content)] = content
    return memory


def _read_seal(file: int, key: str) -> tuple[Seal, FileForm]:
    """The seal of a file of that key, checked. Raises SnapshotDamaged, SnapshotMiss, OSError."""
    file_bytes = os.fstat(file).st_size
    if file_bytes % ALIGNMENT or not file_bytes:
        raise damaged(f"its length is {file_bytes} bytes, which isn't a multiple of {ALIGNMENT}")
    page = aligned_memory(ALIGNMENT)
    _read_all(file, 0, [page])
    header = aligned_memory(padded(header_bytes_of(page, file_bytes)))
    _read_all(file, 0, [header])
    found, seal, form = read_header(bytes(header), file_bytes)
    if found != key:
        raise damaged(f"it is of the key {found!r}, under the name of {key!r}")
    return seal, form


def _read_chunks(file: int, form: FileForm, seal: Seal, chunks: Sequence[memoryview]) -> None:
    parts: list[memoryview] = []
    ends: list[tuple[memoryview, memoryview]] = []
    for chunk in chunks:
        whole = chunk.nbytes // ALIGNMENT * ALIGNMENT
        parts += [chunk[:whole]] if whole else []
        if whole < chunk.nbytes:
            ends.append((chunk[whole:], aligned_memory(ALIGNMENT)))
            parts.append(ends[-1][1])
    with through_cache_unless_aligned(file, parts):
        _read_all(file, len(form.header), parts)
    for end, page in ends:
        end[:] = page[: end.nbytes]
        if any(page[end.nbytes :]):
            raise damaged("there are bytes between its chunks")
    seal.check_bytes(chunks)


def _read_all(file: int, place: int, parts: Sequence[memoryview]) -> None:
    try:
        read_all(file, place, parts)
    except EOFError as error:
        raise damaged(str(error)) from error
