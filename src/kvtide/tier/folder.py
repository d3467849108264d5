"""Folder: files that are written whole or not at all, on a POSIX file system.

kvtide.tier.names has the names in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from kvtide.errors import UsageError
from kvtide.tier.file_io import are_aligned, takes_direct_io, write_all
from kvtide.tier.names import (
    ASIDE_FORM,
    DAMAGED,
    DIRECTORY,
    DRAFT_FORM,
    FILE_FORM,
    LOCK,
    LOCK_FORM,
    READ,
    SHARD_FORM,
    SUFFIX,
    opened,
    opened_file,
    opened_folder,
    opened_root,
)

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Who looks whether a folder is in use holds its lock for a moment.
_LOCK_TRIES = 4
_LOCK_WAIT_S = 0.05

Opened = TypeVar("Opened")


class FolderInUse(UsageError):
    """Another process, or another tier of this process, uses the folder."""


def first_free(folders: Iterable[Path], open_in: Callable[[Path], Opened]) -> Opened | None:
    """What `open_in` opens in the first of these folders that isn't in use; None if all are.

    `open_in` raises FolderInUse for a folder that is in use. Its other errors come through.
    """
    for folder in folders:
        with suppress(FolderInUse):
            return open_in(folder)
    return None


FileEntry = tuple[float, str, int]
"""A file in a folder: when it was last used, its name (32 hexadecimal digits), and its size.

A plain tuple, since there may be a million: it costs little to make and to sort.
"""


class Draft(NamedTuple):
    """A file that is complete on the disk and doesn't have its name yet."""

    shard: int
    part: str
    name: str


@final
class Folder:
    """A folder of which this process is the only writer. Raises OSError for what the disk refuses.

    Several threads may call it at the same time, `reopen` and `close` aside.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder if it isn't there (its parent must be), and locks it.

        Raises FolderInUse if another process uses it, UsageError where there can't be a folder.
        """
        self.path = path
        self._root = self._lock = -1
        self._identity = b""
        self._lasting: set[str] = set()
        """Names of folders that outlive a power cut."""
        self._orphans: dict[str, None] = {}
        """Drafts that the disk didn't let go. They still take the bytes that are free again."""
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                _sync(path.absolute().parent)
            self._open_and_lock()
            _folders.add(self)
            probe = f".{'0' * 32}.{secrets.token_hex(8)}.part"
            self._is_direct = takes_direct_io(self._root, probe)
        except BlockingIOError as error:
            raise FolderInUse(
                f"disk tier: another process uses the folder {path}; give each process a folder of "
                "its own, or end that process"
            ) from error
        except OSError as error:
            raise UsageError(
                f"disk tier: cannot use the folder {path}: {error.strerror or error}"
            ) from error

    def reopen(self) -> None:
        """Opens the folder again, after errors: its disk may have been away.

        Raises OSError if it isn't the same folder: where a disk isn't mounted any more, an empty
        folder of another disk may be in its place.
        """
        self.close()
        self._open_and_lock()

    def close(self) -> None:
        """Gives the lock back, also where a forked process has the same descriptor. Repeatable."""
        if self._lock >= 0:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        self.abandon()

    def abandon(self) -> None:
        """Closes the descriptors alone: in a fork the lock is its parent's. Repeatable."""
        descriptors = self._root, self._lock
        self._root = self._lock = -1
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)

    def is_there(self) -> bool:
        """Whether the folder is still at its path: its disk may be away."""
        try:
            there = (self.path / LOCK).lstat()
            return os.path.samestat(there, os.fstat(self._lock))
        except OSError:
            return False

    def entries(self) -> Iterator[FileEntry]:
        """All whole files, in any order. Removes orphans: files whose writer has died."""
        with os.scandir(self._root) as found:
            entries = list(found)
        _remove_drafts(self._root, [entry.name for entry in entries])
        shards = [entry.name for entry in entries if _is_shard(entry)]
        for name in shards:
            with suppress(FileNotFoundError), self._folder(name) as shard:
                files, drafts = _files_in(shard, FILE_FORM, name)
                _remove_drafts(shard, drafts)
                yield from files

    def entries_aside(self) -> Iterator[FileEntry]:
        """The files that were moved aside."""
        with suppress(FileNotFoundError), self._folder(DAMAGED) as aside:
            yield from _files_in(aside, ASIDE_FORM)[0]

    def write(self, name: str, parts: Sequence[memoryview]) -> Draft:
        """Writes a file whose contents are `parts`; they are on the disk when this returns.

        `settle` must follow, with or without `publish` before. After an error nothing is left; what
        the disk doesn't let go is removed before anything else is written.
        """
        self._remove_orphans()
        shard = self._made(name[:2])
        part = f".{name}.{secrets.token_hex(8)}.part"
        direct = os.O_DIRECT if self._is_direct and are_aligned(parts) else 0
        try:
            with opened(os.open(part, _NEW | direct, 0o600, dir_fd=shard)) as file:
                write_all(file, parts)
                os.fdatasync(file)
        except BaseException as error:
            if direct and isinstance(error, OSError) and error.errno == errno.EINVAL:
                self._is_direct = False  # the file system doesn't take it after all
            with opened(shard):
                self._remove_draft(shard, part)
            raise
        return Draft(shard, part, name)

    def publish(self, draft: Draft) -> None:
        """Gives a draft its name, in place of what had it. `settle` makes that last."""
        name = draft.name + SUFFIX
        try:
            os.rename(draft.part, name, src_dir_fd=draft.shard, dst_dir_fd=draft.shard)
        except IsADirectoryError:  # somebody else's folder has the name
            self.move_aside(draft.name)
            os.rename(draft.part, name, src_dir_fd=draft.shard, dst_dir_fd=draft.shard)

    def settle(self, draft: Draft) -> None:
        """Makes a published name last, or removes the draft if it wasn't published."""
        with opened(draft.shard) as shard:
            self._remove_draft(shard, draft.part)
            os.fsync(shard)

    def _remove_draft(self, shard: int, part: str) -> None:
        try:
            os.unlink(part, dir_fd=shard)
        except FileNotFoundError:
            pass
        except OSError:
            self._orphans[part] = None

    def _remove_orphans(self) -> None:
        for part in tuple(self._orphans):
            with suppress(FileNotFoundError), self._folder(part[1:3]) as shard:
                os.unlink(part, dir_fd=shard)
            self._orphans.pop(part, None)

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """A descriptor of a file, to read.

        Raises FileNotFoundError, SnapshotDamaged for what isn't a regular file, OSError.
        """
        direct = os.O_DIRECT if self._is_direct else 0
        with (
            self._folder(name[:2]) as shard,
            opened_file(name + SUFFIX, shard, flags=direct) as file,
        ):
            yield file

    def remove(self, name: str) -> None:
        """Removes a file. No error if it isn't there."""
        with suppress(FileNotFoundError, IsADirectoryError), self._folder(name[:2]) as shard:
            os.unlink(name + SUFFIX, dir_fd=shard)

    def move_aside(self, name: str) -> str:
        """Moves a file among the damaged ones; gives its name there."""
        target = f"{name}.{secrets.token_hex(8)}"
        with opened(self._made(DAMAGED)) as aside, self._folder(name[:2]) as shard:
            os.rename(name + SUFFIX, target, src_dir_fd=shard, dst_dir_fd=aside)
        return target

    def remove_aside(self, name: str) -> None:
        """Removes a file that was moved aside. No error if it isn't there."""
        with suppress(FileNotFoundError, IsADirectoryError), self._folder(DAMAGED) as aside:
            os.unlink(name, dir_fd=aside)

    def _open_and_lock(self) -> None:
        self._root = os.open(self.path, DIRECTORY & ~os.O_NOFOLLOW)
        try:
            # Only a folder that wasn't open before may be new: another one may be in its place.
            new = 0 if self._identity else os.O_CREAT
            self._lock = os.open(LOCK, os.O_RDWR | READ | new, 0o600, dir_fd=self._root)
            _lock_alone(self._lock)
            text = os.pread(self._lock, 4096, 0)
            if not text.strip(b"\0") and not self._identity:  # new, or its maker was killed
                text = b'{"kvtide_disk_tier":1,"id":"%s"}\n' % secrets.token_hex(16).encode()
                os.pwrite(self._lock, text, 0)
                os.fsync(self._lock)
                os.fsync(self._root)
            if not LOCK_FORM.fullmatch(text):
                raise OSError(errno.EINVAL, f"its {LOCK} isn't of this version of kvtide")
            if self._identity not in (b"", text):
                raise OSError(errno.ESTALE, "another folder is in its place")
            self._identity = text
        except BaseException:
            self.close()
            raise

    def _folder(self, name: str) -> AbstractContextManager[int]:
        return opened_folder(name, self._root)

    def _made(self, name: str) -> int:
        """A descriptor of the folder of that name, which is made if it isn't there, and lasts."""
        if name not in self._lasting:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
            os.fsync(self._root)
            self._lasting.add(name)
        try:
            return os.open(name, DIRECTORY, dir_fd=self._root)
        except FileNotFoundError:
            self._lasting.discard(name)
            raise


_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _abandon_all() -> None:
    """Runs in a forked process, which must not hold the lock when its parent has ended."""
    for folder in tuple(_folders):
        folder.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _lock_alone(descriptor: int) -> None:
    """Raises BlockingIOError if another process has the lock for longer than a moment."""
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(_LOCK_WAIT_S)


def _sync(folder: Path) -> None:
    """Makes the names in a folder last, where this user may read the folder."""
    with suppress(PermissionError), opened_root(folder) as names:
        os.fsync(names)


def _is_shard(entry: os.DirEntry[str]) -> bool:
    return bool(SHARD_FORM.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _files_in(
    folder: int, form: re.Pattern[str], beginning: str = ""
) -> tuple[list[FileEntry], list[str]]:
    """The regular files of a folder whose names have a form, and all other names.

    The form's group 1 is a file's name. Called for a million files at a start, so it is written
    for speed.
    """
    files: list[FileEntry] = []
    others: list[str] = []
    fullmatch, stat_of, is_file = form.fullmatch, os.stat, stat.S_ISREG
    for name in os.listdir(folder):
        match = fullmatch(name)
        if not match or not match[1].startswith(beginning):
            others.append(name)
            continue
        try:
            about = stat_of(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # it has vanished
            continue
        if is_file(about.st_mode):
            files.append((about.st_mtime, match[1], about.st_size))
    return files, others


def _remove_drafts(folder: int, names: Sequence[str]) -> None:
    """Removes files whose writer has died."""
    for name in names:
        if DRAFT_FORM.fullmatch(name):
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder)
