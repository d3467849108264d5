"""MooncakeTier: keeps snapshots in a Mooncake store, which other machines share.

    put     an object of header and chunks, from where they lie; nobody can read it before its end
    get     read the header and check it → make room → read the chunks to where they belong, check

An object has the form of a snapshot's file (file_form). It is one object, since the store removes
what it likes, and half a snapshot is of no use. The store may lose it at any time: its memory is a
cache, and a node that dies takes its objects along. Then the snapshot is a miss.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final
from weakref import WeakValueDictionary

from kvtide.errors import (
    KvtideError,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
)
from kvtide.layout import FORM_VERSION
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier.base import Tier
from kvtide.tier.file_form import (
    ALIGNMENT,
    LARGEST_HEADER,
    FileForm,
    damaged,
    file_form_of,
    header_bytes_of,
    padded,
    read_header,
)
from kvtide.tier.mooncake_client import (
    CODES,
    MISSING,
    NO_ROOM,
    TRANSFER_FAILED,
    UNREACHABLE,
    MooncakeClient,
    StoreClient,
)
from kvtide.tier.mooncake_connect import connect, no_master
from kvtide.tier.mooncake_settings import MooncakeSettings

_FIRST_READ = 64 << 10
"""Bytes. Most headers are shorter."""
_ZEROS = memoryview(bytes(ALIGNMENT))
# The master makes room in the background, some milliseconds after it refused an object.
_ROOM_WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.16)


@final
class MooncakeTier(Tier):
    """Snapshots in the memory of a Mooncake store's nodes. This process lends the store none.

    The memory of an arena is registered when the first chunk of it moves, and is kept until
    `close`. How much the store has room for, and what leaves first, is the store's business.
    """

    name = "mooncake"

    def __init__(
        self,
        store: str | MooncakeSettings,
        *,
        prefix: str = "kvtide",
        open_client: Callable[[], StoreClient] | None = None,
    ) -> None:
        """Joins a store: its master as `host:port`, the path of a file, or settings.

        Names of objects begin with `prefix`. `open_client` gives the client instead, for tests.
        Raises UsageError if mooncake can't be loaded or the master doesn't answer.
        """
        self._prefix = f"{prefix}/{FORM_VERSION}"  # versions don't meet
        self._turns: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._change = threading.Lock()
        if open_client is None:
            if isinstance(store, str):
                store = MooncakeSettings.parse(store, name="mooncake tier")
            open_client = connect(store)
        try:
            self._client = MooncakeClient(open_client)
        except TierRetry as error:
            raise no_master(error) from error

    def contains(self, key: str) -> bool:
        """See Tier."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """See Tier. One call of the store for all keys. One that it can't tell isn't there."""
        codes = self._client.exist([self._name_of(key) for key in keys])
        if codes and max(codes) < 0:
            raise _error_of("look for", codes[0])
        return [code == 1 for code in codes]

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        form = file_form_of(key, seal)
        if len(form.header) > LARGEST_HEADER:
            raise TierFull(f"mooncake tier: a header of {len(form.header)} bytes is too long")
        parts = [memoryview(form.header), *_spaced(chunks, _ZEROS)]
        with self._turn(key) as name:
            self._remove(name)  # a name in use keeps the object that it has
            for wait_s in (*_ROOM_WAITS_S, None):
                code = self._client.write(name, parts)
                if code != NO_ROOM:
                    break
                if wait_s is None:
                    raise TierFull(
                        f"mooncake tier: no node has room for {form.size_bytes} bytes; add a node, "
                        "or recompute this request"
                    )
                time.sleep(wait_s)
            if code:
                raise _error_of("write", code)

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        with self._turn(key) as name:
            with self._removing_damaged(name):
                seal, form = self._read_seal(name, key)
            rooms = make_room(seal)
            with self._removing_damaged(name):
                gap = memoryview(bytearray(ALIGNMENT))
                self._read(name, len(form.header), _spaced(rooms, gap))
                seal.check_bytes(rooms)
            return seal

    def remove(self, key: str) -> None:
        """See Tier."""
        with self._turn(key) as name:
            self._remove(name)

    def close(self) -> None:
        """Leaves the store, where snapshots stay. Repeatable; a later call would join it again."""
        self._client.close()

    def _name_of(self, key: str) -> str:
        """The name of a key's object. Whoever doesn't know the key can't guess it."""
        content = key.encode("utf-8", "surrogatepass")
        return f"{self._prefix}/{hashlib.blake2b(content, digest_size=16).hexdigest()}"

    @contextmanager
    def _turn(self, key: str) -> Iterator[str]:
        """Within, no other thread works on this key, whose object's name it gives."""
        name = self._name_of(key)
        self._client.require_own_process()
        with self._change:
            turn = self._turns.setdefault(name, threading.RLock())
        with turn:
            yield name

    def _read_seal(self, name: str, key: str) -> tuple[Seal, FileForm]:
        """The seal of an object of that key, checked. Raises the errors of `get`."""
        size_bytes = self._client.size_of(name)
        if size_bytes < 0:
            raise _error_of("read", size_bytes)
        header = bytearray(min(size_bytes, _FIRST_READ))
        self._read(name, 0, [memoryview(header)])
        header_bytes = header_bytes_of(bytes(header[:8]), size_bytes)
        if header_bytes > len(header):
            header = bytearray(header_bytes)
            self._read(name, 0, [memoryview(header)])
        found, seal, form = read_header(bytes(header[:header_bytes]), size_bytes)
        if found != key:
            raise damaged(f"its key is {found!r:.80}, not {key!r:.80}")
        return seal, form

    def _read(self, name: str, place: int, parts: Sequence[memoryview]) -> None:
        code = self._client.read(name, place, parts)
        if code:
            raise _error_of("read", code)

    def _remove(self, name: str) -> None:
        code = self._client.remove(name)
        if code not in (0, MISSING):
            raise _error_of("remove", code)

    @contextmanager
    def _removing_damaged(self, name: str) -> Iterator[None]:
        """Removes an object that is damaged, so that it isn't read again and again."""
        try:
            yield
        except (SnapshotDamaged, SnapshotMiss) as error:
            if not isinstance(error, _Unread):
                with suppress(TierRetry):
                    self._remove(name)
            raise


class _Unread(SnapshotMiss):
    """The object isn't there, or its node doesn't answer: there is nothing to remove."""


def _error_of(verb: str, code: int) -> KvtideError:
    """The error for a code.

    A read from a node that doesn't answer is a miss: others' snapshots are on other nodes, so the
    tier isn't ill as a whole.
    """
    if code == MISSING:
        return _Unread("the mooncake tier has no such snapshot; recompute this request")
    what = f"mooncake tier: cannot {verb} an object: {CODES.get(code, 'an error')} (code {code})"
    if verb == "read" and code in (TRANSFER_FAILED, UNREACHABLE):
        return _Unread(f"{what}; recompute this request")
    return TierRetry(what)


def _spaced(chunks: Sequence[memoryview], gap: memoryview) -> list[memoryview]:
    """Chunks, each with the gap behind it, as they lie in an object; `gap` gives gaps' bytes."""
    parts: list[memoryview] = []
    for chunk in chunks:
        parts += [chunk, gap[: padded(chunk.nbytes) - chunk.nbytes]]
    return [part for part in parts if part.nbytes]
