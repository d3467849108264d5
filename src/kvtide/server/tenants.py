"""Tenants: who may use the server, by their API keys, and whose KV is whose."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import final

from kvtide.errors import UsageError

KEY_VARIABLE = "KVTIDE_API_KEY"
_SHORTEST_KEY = 8
_LARGEST_FILE = 1 << 20


@final
@dataclass(frozen=True)
class Tenant:
    """One who may use the server. `salt` is a secret: tenants with another share no KV."""

    salt: bytes = field(default=b"", repr=False)


@final
class Tenants:
    """The tenants of a server, by their keys. Without keys everybody is the same tenant."""

    def __init__(self, keys: Sequence[str], salt: bytes = b"") -> None:
        """`salt` is the operator's secret, which goes into that of each tenant."""
        self._anybody = None if keys else Tenant(salt)
        self._tenants = [(_digest(key), Tenant(_salt_of(key, salt))) for key in keys]

    @property
    def count(self) -> int:
        """How many there are."""
        return max(1, len(self._tenants))

    @property
    def need_keys(self) -> bool:
        """Whether a client must have a key."""
        return self._anybody is None

    def find(self, authorization: str | None) -> Tenant | None:
        """The tenant with the key of this Authorization header; None if there is none.

        It takes the same time for any wrong key: digests are compared, and with those of all keys.
        """
        if self._anybody is not None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        digest, found = _digest(key.strip()), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def read_keys(path: Path | None, variable: str | None) -> list[str]:
    """The API keys in a file, one a line, and in the value of KVTIDE_API_KEY, a single one.

    Blank lines and those that begin with # are skipped. Raises UsageError, which never has a key.
    """
    lines = [] if path is None else _lines_of(path)
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if path is not None and not keys:
        raise UsageError(f"--api-key-file: {path} has no keys; write one a line")
    if variable is not None:
        keys.append(variable.strip())
    for number, key in enumerate(keys, start=1):
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                f"API key {number} of {len(keys)} is too short or has blanks or other characters "
                f"than ASCII; take {_SHORTEST_KEY} or more, such as from: openssl rand -hex 24"
            )
    return list(dict.fromkeys(keys))


def _lines_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"--api-key-file: cannot read {path}: {error.strerror}") from error
    if len(raw) > _LARGEST_FILE:
        raise UsageError(f"--api-key-file: {path} is larger than 1 MiB; name a file of keys")
    return raw.decode("utf-8", "replace").splitlines()


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), person=b"kvtide API key").digest()


def _salt_of(key: str, salt: bytes) -> bytes:
    """A tenant's salt, from which nobody can tell its key."""
    return blake2b(_digest(key) + salt, digest_size=32, person=b"kvtide tenant").digest()
