"""Writes whole files, and checks before the work begins that they can be written."""

from __future__ import annotations

import os
import secrets
import stat
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
        raise UsageError(f"{option}: cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file, which appears complete or not at all. Raises KvtideError if it can't."""
    try:
        stream = _standard_stream(path)
        if stream is not None:
            # A second open file has its own position: later output would overwrite this text.
            with os.fdopen(os.dup(stream), "w", encoding="utf-8") as file:
                file.write(text)
        elif _is_special(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise KvtideError(f"cannot write {path}: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """Whether it is a terminal, a pipe or /dev/null, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def _standard_stream(path: Path) -> int | None:
    """The descriptor of this process's standard output or error, if `path` is the same file."""
    for stream in (1, 2):
        # The file may be new, and the stream closed.
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(stream)):
                return stream
    return None


def _replace(path: Path, text: str) -> None:
    # An unpredictable name and mode "x", so that a link planted there isn't followed.
    draft = path.with_name(f".kvtide-{secrets.token_hex(8)}.part")
    file = draft.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
        draft.replace(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
