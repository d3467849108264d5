"""The file beside `--out` to which each answer is appended as soon as its prompt is answered.

It holds whole lines, whatever ends the process: half a line, left by a full disk or by SIGKILL, is
cut off again. One process at a time has it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvtide.cli.files import reason_of, sync_folder, write_all
from kvtide.errors import UsageError

_SYNC_S = 1.0


class PartFile:
    """An open file of lines that this process alone appends to; made if there is none.

    `clock` gives seconds; it is a parameter for the tests. Raises UsageError if another process has
    the file, or if it can't be opened. The methods raise OSError.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        try:
            self._descriptor = _open_locked(path)
        except OSError as error:
            raise UsageError(f"cannot open {path} for answers: {reason_of(error)}") from error
        self._synced_at = clock()
        self._is_synced = True
        self._size = os.fstat(self._descriptor).st_size

    @property
    def is_empty(self) -> bool:
        """Whether there is no line."""
        return self._size == 0

    def lines(self) -> Iterator[bytes]:
        """The lines, each with its end."""
        with self.path.open("rb") as file:
            yield from file

    def clear(self) -> None:
        """Removes all lines."""
        self._cut(0)

    def cut_half_line(self) -> None:
        """Removes what follows the last whole line: the process was killed as it wrote it."""
        self._cut(sum(len(line) for line in self.lines() if line.endswith(b"\n")))

    def append(self, line: bytes) -> None:
        """Appends a line whole, or leaves the file as it was and raises."""
        try:
            write_all(self._descriptor, line)
        except BaseException:
            with suppress(OSError):  # what isn't cut off now is when the file is opened again
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)
        self._is_synced = False
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Brings the lines to the disk if a second has passed since that was done."""
        if not self._is_synced and self._clock() - self._synced_at >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        self._synced_at = self._clock()
        os.fdatasync(self._descriptor)
        self._is_synced = True

    def remove(self) -> None:
        """Deletes the file; `close` is still needed."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the file up to other processes."""
        os.close(self._descriptor)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self._size = size


def _open_locked(path: Path) -> int:
    """A descriptor of the file, locked. Raises UsageError if another process has it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"{path} isn't a file, so answers can't be kept there; remove it")
            _lock(descriptor, path)
            if _is_still_there(path, descriptor):
                sync_folder(path.parent)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Its owner removed it, since its run ended, between our opening and our locking.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    # The lock is on the file itself, not on a second file as with filelock: it goes with
    # the process, and nothing is left behind.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{_holder_of(descriptor)} is writing its answers to {path}; wait for it, or name "
            "another file with --out"
        ) from error


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder_of(descriptor: int) -> str:
    """Which process has the lock, as far as the system tells."""
    number = os.fstat(descriptor).st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()  # number: FLOCK ADVISORY WRITE process device:device:inode from to
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(f":{number}"):
                return f"process {words[4]}"
    return "another process"
