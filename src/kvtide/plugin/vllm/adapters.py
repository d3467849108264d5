"""Adapters: which weights a LoRA adapter has, so that its KV isn't taken for another one's.

vLLM tells the KV of adapters apart by name and path, and new weights may lie at an old path. Here
the weights count by their content. vLLM reads them when it likes, also again, so their files must
not have changed since the engine was started: otherwise nobody can tell with which weights KV was
computed, and the adapter's requests are computed without kvtide.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, final
from weakref import WeakSet

from kvtide.errors import first_line
from kvtide.plugin.reader import Table
from kvtide.plugin.weights import WeightsUnknown, digest_of

logger = logging.getLogger(__name__)

READS: Table = {"LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace")}
"""What is read of a request's adapter."""

CHANGES_ALLOWED = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable with which a running server takes new weights for an adapter in use."""


_Looks = dict[str, tuple[int, int, float]]


@final
@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's files as they looked when they were hashed. A worker gets it with a save."""

    path: str
    looks: _Looks

    def are_unchanged(self) -> bool:
        """Whether they look so still: then vLLM has read what was hashed, if it has read them."""
        try:
            return self.looks == _looks(self.path)
        except OSError:
            return False


@final
@dataclass(eq=False)
class AdapterOf:
    """The adapter of a request: a digest of its weights, if these are known for sure."""

    digest: bytes
    files: AdapterFiles | None

    @property
    def is_known(self) -> bool:
        """Whether the request's KV may be kept and found."""
        return self.files is not None

    def key_of(self, key: bytes) -> bytes:
        """The key of a block that was computed with this adapter. The last bytes are the group."""
        return blake2b(key, key=self.digest, digest_size=32).digest() + key[-4:]


@final
class Adapters:
    """The adapters of an engine. One thread calls, the scheduler's."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._started_s = clock()
        self._hashed: dict[str, tuple[AdapterFiles, bytes] | None] = {}
        """By path: the files and their digest; None if nobody can tell the weights any more."""
        self._in_use: dict[int, WeakSet[AdapterOf]] = {}
        self._changed: set[int] = set()

    def of_request(self, adapter: Any) -> AdapterOf:
        """The adapter of a new request. Reads its files when it comes for the first time."""
        if adapter.load_inplace:  # running requests get the new weights, too
            self._give_up(adapter)
        found = None if adapter.lora_int_id in self._changed else self._known(adapter)
        files, digest = found or (None, b"")
        request = AdapterOf(digest, files)
        self._in_use.setdefault(adapter.lora_int_id, WeakSet()).add(request)
        return request

    def look_again(self, adapter: Any) -> None:
        """Makes all requests of an adapter unknown if its files have changed since their hash.

        vLLM reads them when a request begins to run, and again after others took their place.
        """
        self._known(adapter)

    def _known(self, adapter: Any) -> tuple[AdapterFiles, bytes] | None:
        path = adapter.lora_path
        if path not in self._hashed:
            self._hashed[path] = self._hash(path)
        found = self._hashed[path]
        if found is not None and not found[0].are_unchanged():
            found = self._hashed[path] = None
            _warn_of(path)
        if found is None:
            self._give_up(adapter)
        return found

    def _give_up(self, adapter: Any) -> None:
        """From now on nobody can tell with which weights requests of this adapter run."""
        self._changed.add(adapter.lora_int_id)
        for request in self._in_use.get(adapter.lora_int_id, ()):
            request.files = None

    def _hash(self, path: str) -> tuple[AdapterFiles, bytes] | None:
        """The files of an adapter and their digest; None for what isn't a folder of old files."""
        try:
            files = AdapterFiles(path, _looks(path))
            return files, bytes.fromhex(digest_of([Path(path)], self._started_s))
        except (OSError, WeightsUnknown) as error:
            logger.debug("kvtide: %s", first_line(error))
        _warn_of(path)
        return None


def _warn_of(path: str) -> None:
    logger.warning(
        "kvtide keeps no KV of the adapter %s: it must be a folder whose files are older than this "
        "engine; restart vLLM to keep its KV",
        path,
    )


def changes_are_allowed() -> bool:
    """Whether adapters in use may get new weights at any time, of which kvtide isn't told."""
    return os.environ.get(CHANGES_ALLOWED, "0").strip().lower() in ("1", "true")


def _looks(path: str) -> _Looks:
    """For each file of a folder its number, size, and the time of its last change since 1970."""
    looks = {}
    for file in sorted(Path(path).iterdir()):
        about = file.stat()
        if file.is_file():
            looks[file.name] = about.st_ino, about.st_size, max(about.st_mtime, about.st_ctime)
    return looks
