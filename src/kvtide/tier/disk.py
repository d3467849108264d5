"""DiskTier: keeps snapshots as files in a folder, within a limit of bytes.

    put     reserve bytes, others leave if need be → write and sync a draft → give it its name
    get     read the header and check it → make room → read and check each chunk

What is in the folder is found again at the next start, and after each moment at which the books and
the folder may differ: when the disk was away, or Ctrl-C came while a call was under way. A file
that vanishes is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from kvtide.errors import (
    LayoutError,
    ProcessForked,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
    UsageError,
)
from kvtide.integers import checked_integer
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier.base import Tier
from kvtide.tier.books import Books, Reading, Reserved
from kvtide.tier.file_check import read_chunks, read_seal
from kvtide.tier.file_form import ALIGNMENT, LARGEST_HEADER, FileForm, file_form_of, padded
from kvtide.tier.file_io import aligned_memory
from kvtide.tier.folder import Draft, Folder
from kvtide.tier.names import name_of
from kvtide.tier.namespace import is_shared

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S = 5.0


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


@final
class DiskTier(Tier):
    """Snapshots in files of `folder`, together never more than `limit_bytes`.

    What was used least recently leaves for others: the tier is a cache. With `keeps_used` only
    files of earlier processes leave so; what this tier was given, or has read, stays until it is
    removed, and a put that finds no room raises TierFull. What is shared (`is_shared`) never stays
    so. The same holds when the disk is full before the limit is reached. Files that are being
    written count, and so do damaged files, which were moved aside and leave first. Blocks count as
    whole pages of 4,096 bytes; what the file system needs for itself doesn't count.
    """

    name = "disk"

    def __init__(self, folder: Path, *, limit_bytes: int, keeps_used: bool = False) -> None:
        """Locks the folder, makes it if it isn't there, and finds what it has.

        Raises UsageError if another process uses it or it can't be used, LayoutError for an invalid
        limit. Files that don't fit into the limit any more are removed.
        """
        self._limit_bytes = checked_integer(
            limit_bytes, "disk tier: limit_bytes", least=0, error=LayoutError
        )
        self._keeps_used = keeps_used
        self._change = threading.Lock()  # held for changes of the books, and never for long
        self._process = os.getpid()
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        """Calls under way. One that was interrupted at any place is forgotten with its frame."""
        self._is_lost = self._is_doubtful = self._is_closed = False
        self._has_warned = False
        self._damaged = self._evicted_before = self._peak_before = 0
        self._folder = Folder(folder)
        try:
            self._books = Books(self._folder, self._limit_bytes, keeps_used)
        except BaseException as error:
            self._folder.close()
            if isinstance(error, OSError):
                raise UsageError(
                    f"disk tier: cannot use the folder {folder}: {error.strerror or error}"
                ) from error
            raise

    @property
    def stats(self) -> DiskStats:
        """What the tier has, and its counts."""
        books = self._books
        return DiskStats(
            len(books),
            books.used_bytes,
            max(self._peak_before, books.peak_bytes),
            self._limit_bytes,
            self._damaged,
            self._evicted_before + books.evicted,
        )

    @property
    def names(self) -> frozenset[str]:
        """The names of its files: `kvtide.tier.names.name_of` a key is in it if the tier has it."""
        with self._change:
            return frozenset(self._books.names())

    def contains(self, key: str) -> bool:
        """See Tier."""
        return name_of(key) in self._books and not self._is_lost

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        form = file_form_of(key, seal)
        if len(form.header) > LARGEST_HEADER:
            raise TierFull(
                f"disk tier: a header of {len(form.header)} bytes is too long for a file"
            )
        name = name_of(key)
        with self._working(), self._reserved(form.size_bytes) as reserved:
            draft = self._written(name, _parts_of(form, chunks), form.size_bytes)
            try:
                with self._change:
                    self._folder.publish(draft)
                    self._books.keep(name, reserved, may_leave=is_shared(key))
            finally:
                self._folder.settle(draft)

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        name = name_of(key)
        with self._working(), self._reading(name, key) as reading, ExitStack() as opened:
            with self._judging(name, key, reading):
                file = opened.enter_context(self._folder.open(name))
                _, seal, form = read_seal(file, key)
            chunks = make_room(seal)
            with self._judging(name, key, reading):
                read_chunks(file, form, seal, chunks)
            with suppress(OSError):  # a disk that can only be read can be read
                os.utime(file)  # the order of leaving, for the next start
            return seal

    def remove(self, key: str) -> None:
        """See Tier."""
        name = name_of(key)
        with self._working(), self._change:
            self._folder.remove(name)
            self._books.drop(name)

    def clear(self) -> None:
        """Removes all files that nobody reads now. Raises TierRetry."""
        with self._working(), self._change:
            self._books.clear()

    def close(self) -> None:
        """Gives the folder's lock back, when the last call that is under way has ended. Repeatable.

        Doesn't wait for such a call, even if it hangs. Later ones raise TierRetry.
        """
        if os.getpid() != self._process:
            return
        self._is_closed = True
        if self._change.acquire(timeout=_CLOSE_WAIT_S):  # otherwise a call hangs that holds it
            try:
                if not self._calls:
                    self._folder.close()
            finally:
                self._change.release()

    def _written(self, name: str, parts: Sequence[memoryview], size_bytes: int) -> Draft:
        """Writes a draft. If the disk is full, others leave first, as when the limit is reached."""
        try:
            return self._folder.write(name, parts)
        except OSError as error:
            self._require_full(error)
            with self._change:
                has_freed = self._books.free(size_bytes)
        try:
            if has_freed:
                return self._folder.write(name, parts)
        except OSError as error:
            self._require_full(error)
        raise TierFull(
            f"disk tier: the disk has no {size_bytes} bytes left, with {self._books.used_bytes} of "
            f"{self._limit_bytes} used here; make room on the disk, or recompute this request"
        )

    def _require_full(self, error: OSError) -> None:
        """Raises the error unless it says that the disk is full. Warns of that, once."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "disk tier: the disk is full, with %d of %d bytes used here",
                self._books.used_bytes,
                self._limit_bytes,
            )

    # ---- a call --------------------------------------------------------------------------

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Raises TierRetry for what the disk refuses. Opens the folder again if it was away."""
        if os.getpid() != self._process:
            raise ProcessForked("the disk tier's folder belongs to the process before the fork")
        call = _Call()
        try:
            with self._change:
                self._make_ready()
                self._calls.add(call)
            yield
        except OSError as error:
            if not self._folder.is_there():
                self._is_lost = True
            # Without the folder: what a tier can't do now comes to a server's log.
            raise TierRetry(f"disk tier: {error.strerror or error}") from error
        except Exception:
            raise
        except BaseException:  # Ctrl-C may have come between two changes that belong together
            self._is_doubtful = True
            raise
        finally:
            with self._change:
                self._calls.discard(call)
                if self._is_closed and not self._calls:
                    self._folder.close()

    def _make_ready(self) -> None:
        """Makes the books anew where they may be wrong. Raises TierRetry, OSError."""
        if self._is_closed:
            raise TierRetry("the disk tier is closed")
        if not (self._is_lost or self._is_doubtful):
            return
        if self._calls:
            raise TierRetry(
                "disk tier: the folder is opened again when the calls under way have ended"
            )
        if self._is_lost:
            self._folder.reopen()
        self._evicted_before += self._books.evicted
        self._peak_before = max(self._peak_before, self._books.peak_bytes)
        used = self._books.used
        self._books = Books(self._folder, self._limit_bytes, self._keeps_used, used)
        self._is_lost = self._is_doubtful = False

    @contextmanager
    def _reserved(self, size_bytes: int) -> Iterator[Reserved]:
        """Within, `size_bytes` count as used: others leave first. Raises TierFull, OSError."""
        reserved = Reserved(size_bytes)
        with self._change:
            self._books.reserve(reserved)
        try:
            yield reserved
        finally:
            with self._change:
                self._books.give_up(reserved)

    @contextmanager
    def _reading(self, name: str, key: str) -> Iterator[Reading]:
        """Within, the file doesn't leave for others. Raises SnapshotMiss if there is none."""
        with self._change:
            reading = self._books.begin(name, may_leave=is_shared(key))
        if reading is None:
            raise _miss(key)
        try:
            yield reading
        finally:
            with self._change:
                self._books.end(name, reading)

    @contextmanager
    def _judging(self, name: str, key: str, reading: Reading) -> Iterator[None]:
        """Moves a damaged file aside for whoever looks into it, and forgets one that has vanished.

        A file of another version is moved aside, too. A newer file of the same name stays.
        """
        try:
            yield
        except FileNotFoundError as error:
            with self._change:
                if self._books.is_current(name, reading):
                    self._books.drop(name)
            raise _miss(key) from error
        except (SnapshotDamaged, SnapshotMiss):
            with self._change:
                if self._books.is_current(name, reading):
                    self._damaged += 1
                    self._books.move_aside(name)
            raise


class _Call:
    """A call that is under way."""

    __slots__ = ("__weakref__",)


def _miss(key: str) -> SnapshotMiss:
    return SnapshotMiss(f"the disk tier has no snapshot {key!r}; recompute this request")


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
