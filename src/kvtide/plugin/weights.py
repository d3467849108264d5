"""Which weights a page of KV was computed with: a digest of their files, and updates since.

The same name may stand for other weights tomorrow, so a page is bound to what is in the files:
names, sizes, times of change, and samples of the contents. A file of the Hugging Face cache is
known by the hash of all its contents, which is its name there.

SGLang may change the weights while it runs, and no call of a storage says so: the hooks count that.
Weights that were changed are in no file, so pages of them belong to this run of the server alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

from kvtide.layout import canonical_json

_WHOLE_BYTES = 1 << 20
"""A file up to this size is read whole."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_CONTENT_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class WeightsUnknown(Exception):
    """The files don't tell the weights; the message says why."""


def digest_of(paths: Iterable[Path], loaded_after: float) -> str:
    """A digest of the files at these paths, and of the files in these folders, in hex digits.

    Raises WeightsUnknown for a path that isn't there, and for a file that was changed after
    `loaded_after`, in seconds since 1970: other contents may have been loaded.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            for file in _files_at(path):
                digest.update(_description(file, loaded_after))
        except OSError as error:
            raise WeightsUnknown(f"{path}: {error.strerror or error}") from error
        digest.update(b"\n")
    return digest.hexdigest()


def _files_at(path: Path) -> list[Path]:
    """The file, or the files of a folder but for those in its folders, which no loader reads."""
    if not path.is_dir():
        return [path]
    return [found for found in sorted(path.iterdir()) if found.is_file()]


def _description(file: Path, loaded_after: float) -> bytes:
    """A file's name and contents in a few bytes."""
    target = file.resolve()
    if target.parent.name == "blobs" and _CONTENT_HASH.fullmatch(target.name):
        return canonical_json([file.name, target.name]).encode()
    with target.open("rb") as content:
        about = os.fstat(content.fileno())
        if about.st_mtime > loaded_after:
            raise WeightsUnknown(f"{file} was changed after this server was started")
        samples = hashlib.blake2b(digest_size=16)
        for place in _places(about.st_size):
            content.seek(place)
            samples.update(content.read(_SAMPLE_BYTES))
    facts = [file.name, about.st_size, about.st_mtime_ns, samples.hexdigest()]
    return canonical_json(facts).encode()


def _places(size_bytes: int) -> Iterator[int]:
    """Where a file of that size is read, `_SAMPLE_BYTES` at each place; its end is among them."""
    if size_bytes <= _WHOLE_BYTES:
        yield from range(0, size_bytes, _SAMPLE_BYTES)
        return
    last = size_bytes - _SAMPLE_BYTES
    yield from (last * number // (_SAMPLES - 1) for number in range(_SAMPLES))


@final
class Updates:
    """What has happened to this process's weights since SGLang loaded them."""

    def __init__(self) -> None:
        self._change = threading.Lock()
        self.count = 0
        """How often the weights were changed."""
        self.are_mixed = False
        """Whether SGLang's cache may have KV of weights before the last change."""

    def note_update(self) -> None:
        """The weights are changing, or have changed."""
        with self._change:
            self.count += 1
            self.are_mixed = True

    def note_flush(self) -> None:
        """SGLang has forgotten all KV."""
        with self._change:
            self.are_mixed = False


UPDATES = Updates()
"""This process's, which the hooks note."""
