"""Folder: files that are written whole or not at all, on a POSIX file system.

    D/kvtide.lock                which folder this is; locked while a process uses it
    D/ab/ab12….safetensors       a file, in one of 256 folders by the beginning of its name
    D/ab/.ab12….9f3c….part       a file that is being written; without a writer it is an orphan
    D/damaged/ab12….9f3c…        a file whose bytes were wrong, moved aside

Names in the folder are hostile: no link is followed, only regular files are opened, and only names
of these forms are touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, final

from kvtide.errors import UsageError
from kvtide.tier.file_io import are_aligned, takes_direct_io, write_all

_LOCK = "kvtide.lock"
_DAMAGED = "damaged"
_SUFFIX = ".safetensors"
_FILE = re.compile(r"([0-9a-f]{32})\.safetensors")
_PART = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.part")
_ASIDE = re.compile(r"([0-9a-f]{32}\.[0-9a-f]{16})")
_SHARD = re.compile(r"[0-9a-f]{2}")
_LOCK_TEXT = re.compile(rb'\{"kvtide_disk_tier":1,"id":"[0-9a-f]{32}"\}\n')
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the open of a pipe would wait for the pipe's writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderInUse(UsageError):
    """Another process, or another tier of this process, uses the folder."""


class FileEntry(NamedTuple):
    """A file in a folder: its name (32 hexadecimal digits), its size, and when it was last used."""

    name: str
    size_bytes: int
    used_at: float


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
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            self._open_and_lock()
            with _opened(os.open(path, _DIRECTORY & ~os.O_NOFOLLOW)) as root:
                self._is_direct = takes_direct_io(root, f".{'0' * 32}.{secrets.token_hex(8)}.part")
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
        """Gives the lock back. Repeatable."""
        for descriptor in (self._root, self._lock):
            with suppress(OSError):
                os.close(descriptor)
        self._root = self._lock = -1

    def is_there(self) -> bool:
        """Whether the folder is still at its path: its disk may be away."""
        try:
            there = (self.path / _LOCK).lstat()
            return os.path.samestat(there, os.fstat(self._lock))
        except OSError:
            return False

    def entries(self) -> Iterator[FileEntry]:
        """All whole files, in any order. Removes orphans: files whose writer has died."""
        with _opened(os.dup(self._root)) as root:
            shards = [entry.name for entry in os.scandir(root) if _is_shard(entry)]
        for name in shards:
            with self._folder(name) as shard:
                yield from (entry for entry in _files_in(shard, _FILE) if entry.name[:2] == name)
                with os.scandir(shard) as found:
                    orphans = [entry.name for entry in found if _PART.fullmatch(entry.name)]
                for orphan in orphans:
                    os.unlink(orphan, dir_fd=shard)

    def entries_aside(self) -> Iterator[FileEntry]:
        """The files that were moved aside."""
        with suppress(FileNotFoundError), self._folder(_DAMAGED) as damaged:
            yield from _files_in(damaged, _ASIDE)

    def write(self, name: str, parts: Sequence[memoryview]) -> Draft:
        """Writes a file whose contents are `parts`; they are on the disk when this returns.

        `settle` must follow, with or without `publish` before. After an error nothing is left.
        """
        shard = self._made(name[:2])
        part = f".{name}.{secrets.token_hex(8)}.part"
        try:
            direct = os.O_DIRECT if self._is_direct and are_aligned(parts) else 0
            with _opened(os.open(part, _NEW | direct, 0o600, dir_fd=shard)) as file:
                write_all(file, parts)
                os.fdatasync(file)
        except BaseException:
            with suppress(OSError), _opened(shard):
                os.unlink(part, dir_fd=shard)
            raise
        return Draft(shard, part, name)

    def publish(self, draft: Draft) -> None:
        """Gives a draft its name, in place of what had it. `settle` makes that last."""
        name = draft.name + _SUFFIX
        os.rename(draft.part, name, src_dir_fd=draft.shard, dst_dir_fd=draft.shard)

    def settle(self, draft: Draft) -> None:
        """Makes a published name last, or removes the draft if it wasn't published."""
        with _opened(draft.shard) as shard:
            with suppress(FileNotFoundError):
                os.unlink(draft.part, dir_fd=shard)
            os.fsync(shard)

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """A descriptor of a file, to read. Raises FileNotFoundError, and OSError for no file."""
        direct = os.O_DIRECT if self._is_direct else 0
        with self._folder(name[:2]) as shard:
            file = os.open(name + _SUFFIX, _READ | direct, dir_fd=shard)
        with _opened(file):
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, f"{name}{_SUFFIX} isn't a regular file")
            yield file

    def remove(self, name: str) -> None:
        """Removes a file. No error if it isn't there."""
        with suppress(FileNotFoundError), self._folder(name[:2]) as shard:
            os.unlink(name + _SUFFIX, dir_fd=shard)

    def move_aside(self, name: str) -> str:
        """Moves a file among the damaged ones; gives its name there."""
        target = f"{name}.{secrets.token_hex(8)}"
        with _opened(self._made(_DAMAGED)) as damaged, self._folder(name[:2]) as shard:
            os.rename(name + _SUFFIX, target, src_dir_fd=shard, dst_dir_fd=damaged)
        return target

    def remove_aside(self, name: str) -> None:
        """Removes a file that was moved aside. No error if it isn't there."""
        with suppress(FileNotFoundError), self._folder(_DAMAGED) as damaged:
            os.unlink(name, dir_fd=damaged)

    def _open_and_lock(self) -> None:
        self._root = os.open(self.path, _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            if not self._identity:
                self._make_lock()
            self._lock = os.open(_LOCK, os.O_RDWR | _READ, dir_fd=self._root)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = os.pread(self._lock, 4096, 0)
            if not _LOCK_TEXT.fullmatch(text):
                raise OSError(errno.EINVAL, f"its {_LOCK} isn't of this version of kvtide")
            if self._identity not in (b"", text):
                raise OSError(errno.ESTALE, "another folder is in its place")
            self._identity = text
        except BaseException:
            self.close()
            raise

    def _make_lock(self) -> None:
        with (
            suppress(FileExistsError),
            _opened(os.open(_LOCK, _NEW, 0o600, dir_fd=self._root)) as lock,
        ):
            os.write(lock, b'{"kvtide_disk_tier":1,"id":"%s"}\n' % secrets.token_hex(16).encode())
            os.fsync(lock)

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        with _opened(os.open(name, _DIRECTORY, dir_fd=self._root)) as folder:
            yield folder

    def _made(self, name: str) -> int:
        """A descriptor of the folder of that name, which is made if it isn't there."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root)
            os.fsync(self._root)
        return os.open(name, _DIRECTORY, dir_fd=self._root)


@contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_shard(entry: os.DirEntry[str]) -> bool:
    return bool(_SHARD.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _files_in(folder: int, form: re.Pattern[str]) -> Iterator[FileEntry]:
    """The regular files of a folder whose names have a form; the form's group 1 is their name."""
    with os.scandir(folder) as found:
        for entry in found:
            name = form.fullmatch(entry.name)
            if name:
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    yield FileEntry(name[1], about.st_size, about.st_mtime)
