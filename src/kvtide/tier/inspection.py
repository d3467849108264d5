"""Looks into the folder of a disk tier: what is there, and whether each byte is right. No torch.

whole      a snapshot whose every byte was checked
damaged    a snapshot's file with a wrong byte, or one that was moved aside for that
orphan     a file whose writer has died, or is at it if a process uses the folder
foreign    anything that isn't kvtide's
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, final, get_args

from kvtide.errors import SnapshotDamaged, SnapshotMiss, UsageError
from kvtide.tier.file_check import check_file
from kvtide.tier.folder import Folder
from kvtide.tier.names import (
    ASIDE_FORM,
    DAMAGED,
    DRAFT_FORM,
    FILE_FORM,
    LOCK,
    LOCK_FORM,
    SHARD_FORM,
    opened_file,
    opened_folder,
    opened_root,
)

State = Literal["whole", "damaged", "orphan", "foreign"]
STATES: tuple[State, ...] = get_args(State)


@final
class FoundFile(NamedTuple):
    """What is under a path in the folder. `key` and `token_count` are those of a whole snapshot.

    `reason` says why it isn't whole.
    """

    path: str
    state: State
    size_bytes: int
    key: str | None = None
    token_count: int | None = None
    reason: str = ""


def is_in_use(path: Path) -> bool:
    """Whether a process uses the folder now. Raises UsageError for a folder of no disk tier."""
    with ExitStack() as stack:
        try:
            root = stack.enter_context(opened_root(path))
            lock = stack.enter_context(opened_file(LOCK, root))
            text = os.pread(lock, 4096, 0)
        except (OSError, SnapshotDamaged) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path} is no folder of a disk tier: {LOCK}: {reason}") from error
        if not LOCK_FORM.fullmatch(text):
            raise UsageError(f"{path} is no folder of a disk tier: its {LOCK} has other contents")
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def inspect_folder(path: Path) -> Iterator[FoundFile]:
    """Everything in the folder, in the order of the names. Reads and checks each snapshot.

    It needs no lock: what vanishes meanwhile isn't listed. Raises OSError.
    """
    with opened_root(path) as root:
        for name in _names_in(root):
            if name == LOCK:
                continue
            about = _about(name, root)
            if about is not None and stat.S_ISDIR(about.st_mode) and _is_ours(name):
                yield from _inspect_inner(name, root)
            elif about is not None:
                yield _inspect_other(name, name, about)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process uses the folder. Raises FolderInUse, UsageError."""
    with closing(Folder(path)):
        yield


def remove_files(path: Path, found: Sequence[FoundFile]) -> list[FoundFile]:
    """Removes files of `found`, but no folders; gives those that were removed.

    The caller has the folder locked since before it looked. Raises OSError.
    """
    removed = []
    with opened_root(path) as root:
        for file in found:
            with suppress(FileNotFoundError, IsADirectoryError), ExitStack() as stack:
                inner, _, name = file.path.rpartition("/")
                folder = stack.enter_context(opened_folder(inner, root)) if inner else root
                os.unlink(name, dir_fd=folder)
                removed.append(file)
    return removed


def _is_ours(name: str) -> bool:
    return name == DAMAGED or SHARD_FORM.fullmatch(name) is not None


def _inspect_inner(folder_name: str, root: int) -> Iterator[FoundFile]:
    with suppress(FileNotFoundError), opened_folder(folder_name, root) as folder:
        for name in _names_in(folder):
            about = _about(name, folder)
            if about is None:
                continue
            path = f"{folder_name}/{name}"
            is_file = FILE_FORM.fullmatch(name) and name.startswith(folder_name)
            if folder_name == DAMAGED and ASIDE_FORM.fullmatch(name):
                yield FoundFile(path, "damaged", _size(about), reason="it was moved aside")
            elif is_file and folder_name != DAMAGED:
                with suppress(FileNotFoundError):
                    yield _inspect_file(path, name, folder, about)
            else:
                yield _inspect_other(path, name, about)


def _inspect_file(path: str, name: str, folder: int, about: os.stat_result) -> FoundFile:
    try:
        with opened_file(name, folder) as file:
            key, seal = check_file(file, name.partition(".")[0])
            size_bytes = os.fstat(file).st_size
        return FoundFile(path, "whole", size_bytes, key, seal.token_count)
    except (SnapshotDamaged, SnapshotMiss) as error:
        return FoundFile(path, "damaged", _size(about), reason=str(error))
    except FileNotFoundError:
        raise
    except OSError as error:
        return FoundFile(path, "damaged", _size(about), reason=error.strerror or str(error))


def _inspect_other(path: str, name: str, about: os.stat_result) -> FoundFile:
    if DRAFT_FORM.fullmatch(name) and stat.S_ISREG(about.st_mode):
        return FoundFile(path, "orphan", _size(about), reason="it was never complete")
    kind = "a folder" if stat.S_ISDIR(about.st_mode) else "not of kvtide"
    return FoundFile(path, "foreign", _size(about), reason=kind)


def _names_in(folder: int) -> list[str]:
    with os.scandir(folder) as found:
        return sorted(entry.name for entry in found)


def _about(name: str, folder: int) -> os.stat_result | None:
    """What is under a name; None if it has vanished."""
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def _size(about: os.stat_result) -> int:
    return about.st_size if stat.S_ISREG(about.st_mode) else 0
