"""Writes files that appear whole or not at all, and checks before the work that they can appear."""

from __future__ import annotations

import errno
import os
import secrets
import select
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvtide.errors import KvtideError, UsageError


def check_writable(path: Path, *, option: str) -> None:
    """Raises UsageError if the value of `option` can't be written as a file.

    It is called before the requests are answered, since the answers would be lost otherwise.
    """
    folder = path.parent
    try:
        with suppress(FileNotFoundError):
            path.stat()  # raises for links in a circle and long names; `is_dir` wouldn't
        if path.is_dir():
            raise UsageError(f"{option}: {path} is a folder; give the name of a file")
        if not folder.is_dir():
            raise UsageError(f"{option}: there is no folder {folder} for {path.name}; make it")
        target = path if _is_special(path) else folder
        if not os.access(target, os.W_OK):
            raise UsageError(f"{option}: no permission to write to {target}")
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {reason_of(error)}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, which appears complete or not at all. Raises KvtideError if it can't."""
    try:
        stream = open_stream(path)
        if stream is None:
            replace_file(Path(os.path.realpath(path)), [text.encode()])
            return
        try:
            write_all(stream, text.encode())
        finally:
            os.close(stream)
    except OSError as error:
        raise KvtideError(f"cannot write {path}: {reason_of(error)}") from error


def open_stream(path: Path) -> int | None:
    """A new descriptor to write to `path`, if no file may take its place; None if one may.

    That is so for a terminal, a pipe and /dev/null, and for the file that is this process's
    standard output or error. Raises OSError if it can't be opened.
    """
    standard = standard_stream(path)
    if standard is not None:
        # A second open file has its own position: later output would overwrite this text.
        return os.dup(standard)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC) if _is_special(path) else None


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, also to a pipe that doesn't wait for its reader. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Puts a file of these bytes in the place of `path`, which is no link. Raises OSError.

    Whatever ends the process or the machine, the old file or the new one is there, whole.
    """
    # An unpredictable name and mode "x", so that a link planted there isn't followed.
    draft = path.with_name(f".kvtide-{secrets.token_hex(8)}.part")
    file = draft.open("xb")
    try:
        with file:
            if path.exists():  # first: who may not read the old file may not read this one either
                draft.chmod(stat.S_IMODE(path.stat().st_mode))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def sync_folder(folder: Path) -> None:
    """Waits until the names of the folder's files are on the disk, where the system can do so.

    Raises OSError if the disk fails.
    """
    with suppress(PermissionError):  # who may write to a folder may not always read it
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system doesn't know of it
                raise
        finally:
            os.close(descriptor)


def reason_of(error: OSError) -> str:
    """The reason in the system's words, such as `No space left on device`."""
    return error.strerror or str(error)


def _is_special(path: Path) -> bool:
    """Whether it is a terminal, a pipe or /dev/null, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def standard_stream(path: Path) -> int | None:
    """The descriptor of this process's standard output or error, if `path` is the same file."""
    for stream in (1, 2):
        # The file may be new, and the stream closed.
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(stream)):
                return stream
    return None
