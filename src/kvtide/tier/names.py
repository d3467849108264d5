"""The names in a folder of a disk tier, and how they are opened: no link is ever followed.

    D/kvtide.lock                which folder this is; locked while a process uses it
    D/ab/ab12….safetensors       a file, in one of 256 folders by the beginning of its name
    D/ab/.ab12….9f3c….part       a file that is being written; without a writer it is an orphan
    D/damaged/ab12….9f3c…        a file whose bytes were wrong, moved aside

Names in the folder are hostile: only regular files are opened (a device may act when it is opened),
and only names of these forms are touched.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtide.tier.file_form import damaged

LOCK = "kvtide.lock"
DAMAGED = "damaged"
SUFFIX = ".safetensors"
FILE_FORM = re.compile(r"([0-9a-f]{32})\.safetensors")
DRAFT_FORM = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{16}\.part")
ASIDE_FORM = re.compile(r"([0-9a-f]{32}\.[0-9a-f]{16})")
SHARD_FORM = re.compile(r"[0-9a-f]{2}")
LOCK_FORM = re.compile(rb'\{"kvtide_disk_tier":1,"id":"[0-9a-f]{32}"\}\n')

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the open of a pipe would wait for the pipe's writer.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def name_of(key: str) -> str:
    """The name of a key's file, without its suffix: a hash, since a key is hostile."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_root(path: Path) -> Iterator[int]:
    """A descriptor of the folder at a path, which may be a link. Raises OSError."""
    with opened(os.open(path, DIRECTORY & ~os.O_NOFOLLOW)) as root:
        yield root


@contextmanager
def opened_folder(name: str, root: int) -> Iterator[int]:
    """A descriptor of a folder in the folder `root`. Raises FileNotFoundError if there is none."""
    try:
        folder = os.open(name, DIRECTORY, dir_fd=root)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a file or a link has its name
            raise FileNotFoundError(errno.ENOENT, f"{name} isn't a folder") from error
        raise
    with opened(folder):
        yield folder


@contextmanager
def opened_file(name: str, folder: int, *, flags: int = 0) -> Iterator[int]:
    """A descriptor of a file in a folder, to read. `flags` are more flags of open(2).

    Raises FileNotFoundError, SnapshotDamaged for what isn't a regular file, OSError.
    """
    _require_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    with opened(os.open(name, READ | flags, dir_fd=folder)) as file:
        _require_regular(os.fstat(file))  # it may be another one by now
        yield file


def _require_regular(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise damaged("it isn't a regular file")
