"""Which weights a model or an adapter has: a digest of its files.

The same name may stand for other weights tomorrow, so KV is bound to what is in the files. A file
of the Hugging Face cache has a hash of all its contents as its name there, and is known by it where
it still has these contents: a copy onto its link overwrites the file and leaves its name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvtide.layout import canonical_json

_WHOLE_BYTES = 1 << 20
"""A file up to this size is read whole, also where samples are enough."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_PIECE_BYTES = 64 << 20
"""What a thread reads of a file before another thread may have the next piece."""
_READ_BYTES = 1 << 20
_MOST_THREADS = 8
_SHA1 = re.compile(r"[0-9a-f]{40}")
"""The name of a small file in the hub's cache: git's hash of it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
"""The name of a large file in the hub's cache."""


class WeightsUnknown(Exception):
    """The files don't tell the weights; the message says why."""


def folder_of(model: str, revision: str | None, cache: str | None) -> Path:
    """The files of a model: its path, or its folder in the cache that the engine filled.

    `revision` may be a branch. Raises WeightsUnknown if the model is in neither place.
    """
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        found: Any = snapshot_download(
            model, revision=revision, cache_dir=cache, local_files_only=True
        )
    except Exception as error:  # not a name, not in the cache, or of another hub
        raise WeightsUnknown(f"{model} isn't a folder, and not in the hub's cache") from error
    return Path(found)


def digest_of(
    paths: Iterable[Path],
    loaded_after: float,
    *,
    suffixes: Collection[str] = (),
    by_samples: bool = False,
    may_be_none: bool = False,
) -> str:
    """A digest of the files at these paths, and of the files in these folders, in hex digits.

    With `suffixes` only files count whose names end so, those in folders of the folders, too. Names
    and all contents decide; with `by_samples` names, sizes, times of change, and samples. A file of
    the hub's cache has the hash that is its name instead of a time: so copies are the same.

    Raises WeightsUnknown for a path that isn't there, for one without files unless `may_be_none`,
    and for a file that was changed after `loaded_after`, in seconds since 1970: other contents may
    have been loaded.
    """
    digest = hashlib.blake2b(digest_size=32)
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, "kvtide-weights") as threads:
        for path in paths:
            try:
                files = _files_at(path, suffixes)
                names = list(threads.map(partial(_hub_name, trusts_link=by_samples), files))
                for file, name in zip(files, names, strict=True):
                    digest.update(_description(file, name, loaded_after, by_samples, threads))
            except OSError as error:
                raise WeightsUnknown(f"{path}: {error.strerror or error}") from error
            if not files and not may_be_none:
                raise WeightsUnknown(f"{path}: there are no files of weights to hash")
            digest.update(b"\n")
    return digest.hexdigest()


def _files_at(path: Path, suffixes: Collection[str]) -> list[Path]:
    """The file, or the files of a folder; without suffixes none in its folders."""
    if not path.is_dir():
        found: Sequence[Path] = [path]
    else:
        found = sorted(path.rglob("*") if suffixes else path.iterdir())
    kept = [file for file in found if not suffixes or file.suffix in suffixes]
    return [file for file in kept if file.is_file() or file == path]


def _hub_name(link: Path, *, trusts_link: bool) -> str:
    """The hash that names a file in the hub's cache, if it has these contents; else nothing.

    With `trusts_link` a file that is older than the link to it needn't be read: the hub's client
    makes the link when the file is whole, and whoever overwrites the file makes it newer.
    """
    file = link.resolve()
    if file.parent.name != "blobs":
        return ""
    about = file.stat()
    if _SHA256.fullmatch(file.name):
        digest = hashlib.sha256()
    elif _SHA1.fullmatch(file.name):
        digest = hashlib.sha1(f"blob {about.st_size}\0".encode(), usedforsecurity=False)
    else:
        return ""
    if trusts_link and link.is_symlink() and changed_ns(about) <= link.lstat().st_ctime_ns:
        return file.name
    with file.open("rb") as content:
        while part := content.read(_READ_BYTES):
            digest.update(part)
    return file.name if digest.hexdigest() == file.name else ""


def _description(
    file: Path, hub_name: str, loaded_after: float, by_samples: bool, threads: ThreadPoolExecutor
) -> bytes:
    """A file's name and contents in a few bytes. `hub_name` is what `_hub_name` gave."""
    if hub_name and not by_samples:
        return canonical_json([file.name, hub_name]).encode()
    with file.open("rb") as content:
        size_bytes = os.fstat(content.fileno()).st_size
        step = _SAMPLE_BYTES if by_samples else _PIECE_BYTES
        places = _samples(size_bytes) if by_samples else range(0, size_bytes, step)
        pieces = threads.map(partial(_digest_at, content.fileno(), size_bytes=step), places)
        digests = [piece.hex() for piece in pieces]
        about = os.fstat(content.fileno())
    if not hub_name and changed_ns(about) > loaded_after * 1e9:
        raise WeightsUnknown(f"{file} was changed after this server was started")
    times = [hub_name or about.st_mtime_ns] if by_samples else []
    return canonical_json([file.name, about.st_size, *times, *digests]).encode()


def changed_ns(about: os.stat_result) -> int:
    """When a file was changed. A copy that keeps times, as rsync's, has a new time of its entry."""
    return max(about.st_mtime_ns, about.st_ctime_ns)


def _digest_at(file: int, place: int, *, size_bytes: int) -> bytes:
    """A digest of a piece of a file. Its threads share the descriptor, but not its position."""
    digest = hashlib.blake2b(digest_size=32)
    end = place + size_bytes
    while part := os.pread(file, min(_READ_BYTES, end - place), place):
        digest.update(part)
        place += len(part)
    return digest.digest()


def _samples(size_bytes: int) -> Iterator[int]:
    """Where a file of that size is read, `_SAMPLE_BYTES` at each place; its end is among them."""
    if size_bytes <= _WHOLE_BYTES:
        yield from range(0, size_bytes, _SAMPLE_BYTES)
        return
    last = size_bytes - _SAMPLE_BYTES
    yield from (last * number // (_SAMPLES - 1) for number in range(_SAMPLES))
