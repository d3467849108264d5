"""Namespace: which KV may stand for which. Keys in a tier are made here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import final

from kvtide.errors import UsageError

SALT = "KVTIDE_SALT"
"""The variable that has a tenant's secret: other users can't read the environment of a process."""

_DIGEST_BYTES = 16
_PERSON = b"kvtide key"
_SHARED = "shared/"


def salt_of(environment: Mapping[str, str]) -> bytes:
    """The tenant's secret that an operator has set, as it is; empty if none is set."""
    return os.fsencode(environment.get(SALT, ""))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """All that decides the bytes of KV, apart from its tokens.

    KV of one namespace never has a key of another. Each field is any text; an empty one is a value
    like any other.
    """

    model: str
    """The model's name or fingerprint."""
    weights: str
    """The revision of its weights, or a hash of them: a name doesn't change with its weights."""
    layout: str
    """The fingerprint of the pool's geometry, in hex digits."""
    engine: str = ""
    """The engine's version and whatever of its configuration decides a byte."""
    stage: str = ""
    """The pipeline stage and their count, such as `0/2`."""
    rank: str = ""
    """The rank in its stage and their count, such as `1/4`."""
    adapter: str = ""
    """The adapter that changes the weights, such as a hash of a LoRA's files."""
    salt: bytes = field(default=b"", repr=False)
    """The tenant's secret. Who doesn't know it can't make a key of the tenant's."""

    def __post_init__(self) -> None:
        """Raises UsageError for a field that is neither text nor, for the salt, bytes."""
        for about in fields(self):
            wanted = bytes if about.name == "salt" else str
            if not isinstance(getattr(self, about.name), wanted):
                raise UsageError(f"namespace: {about.name} must be {wanted.__name__}")

    def key_of(self, name: str) -> str:
        """The key of the KV with that name: 32 hex digits for the namespace, `/`, and 32 for both.

        `name` says which tokens it has: for example the hash of a chain of blocks.
        """
        ours, digest = _begun(self)
        digest = digest.copy()
        digest.update(f", {json.dumps(name)}]".encode())
        return f"{ours}/{digest.hexdigest()}"

    def shared_key_of(self, name: str) -> str:
        """The key of KV that belongs to no request: see `is_shared`."""
        return _SHARED + self.key_of(name)


def is_shared(key: str) -> bool:
    """Whether many requests, and other processes, may use what is under this key.

    Below host memory it is a cache: who forgets it leaves it there, and it leaves for others.
    """
    return key.startswith(_SHARED)


@lru_cache(maxsize=256)
def _begun(namespace: Namespace) -> tuple[str, hashlib.blake2b]:
    """A namespace's half of its keys, and the hash of the other half up to the name.

    A namespace has many keys, so this is done once. The salt is the secret key of both hashes. The
    text is a JSON list, which says where each part ends, in ASCII, also for what isn't Unicode.
    """
    parts = [getattr(namespace, about.name) for about in fields(namespace)[:-1]]
    secret = hashlib.blake2b(namespace.salt, digest_size=64).digest()
    beginning = json.dumps(parts).encode()[:-1]
    ours, named = (
        hashlib.blake2b(text, key=secret, digest_size=_DIGEST_BYTES, person=_PERSON)
        for text in (beginning + b"]", beginning)
    )
    return ours.hexdigest(), named
