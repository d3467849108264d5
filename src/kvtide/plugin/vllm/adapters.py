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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, final
from weakref import WeakSet

import xxhash

from kvtide.plugin.reader import Table

logger = logging.getLogger(__name__)

READS: Table = {"LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace")}
"""What is read of a request's adapter."""

CHANGES_ALLOWED = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable with which a running server takes new weights for an adapter in use."""

_READ_BYTES = 1 << 22


@final
@dataclass(eq=False)
class AdapterOf:
    """The adapter of a request: a digest of its weights, if these are known for sure."""

    digest: bytes
    is_known: bool

    def key_of(self, key: bytes) -> bytes:
        """The key of a block that was computed with this adapter. The last bytes are the group."""
        return blake2b(key[:-4], key=self.digest, digest_size=32).digest() + key[-4:]


@final
class Adapters:
    """The adapters of an engine. One thread calls, the scheduler's."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._started_s = clock()
        self._known: dict[str, tuple[object, bytes | None]] = {}
        """By path: what the files looked like, and the digest."""
        self._in_use: dict[int, WeakSet[AdapterOf]] = {}
        self._changed: set[int] = set()

    def of_request(self, adapter: Any) -> AdapterOf:
        """The adapter of a new request. Reads its files when it comes for the first time."""
        number = int(adapter.lora_int_id)
        users = self._in_use.setdefault(number, WeakSet())
        if adapter.load_inplace:  # running requests get the new weights, too
            self._changed.add(number)
            for other in users:
                other.is_known = False
        digest = None if number in self._changed else self._digest_of(adapter.lora_path)
        found = AdapterOf(digest or b"", digest is not None)
        users.add(found)
        return found

    def _digest_of(self, path: str) -> bytes | None:
        looks: object = None
        try:
            found = _looks(path)
            before, digest = self._known.get(path, (None, None))
            if before == found:
                return digest
            looks = found
            newest_s = max((look[-1] for look in found.values()), default=float("inf"))
            is_old = before is None and newest_s < self._started_s
            digest = _hash_of(path, found) if is_old else None
            if found != _looks(path):
                digest = None
        except OSError:
            digest = None
        self._known[path] = (looks, digest)
        if digest is None:
            logger.warning(
                "kvtide keeps no KV of the adapter %s: it must be a folder whose files are older "
                "than this engine; restart vLLM to keep its KV",
                path,
            )
        return digest


def changes_are_allowed() -> bool:
    """Whether adapters in use may get new weights at any time, of which kvtide isn't told."""
    return os.environ.get(CHANGES_ALLOWED, "0").strip().lower() in ("1", "true")


def _looks(path: str) -> dict[str, tuple[int, int, float]]:
    """For each file of a folder its number, size, and the time of its last change since 1970."""
    looks = {}
    for file in sorted(Path(path).iterdir()):
        about = file.stat()
        if file.is_file():
            looks[file.name] = about.st_ino, about.st_size, max(about.st_mtime, about.st_ctime)
    return looks


def _hash_of(path: str, names: Iterable[str]) -> bytes:
    digest = xxhash.xxh3_128()
    for name in names:
        digest.update(f"{len(name)} {name} ".encode())
        content = xxhash.xxh3_128()
        with Path(path, name).open("rb") as file:
            while part := file.read(_READ_BYTES):
                content.update(part)
        digest.update(content.digest())
    return digest.digest()
