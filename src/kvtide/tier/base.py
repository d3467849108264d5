"""The contract of a tier: a store for snapshots below host memory. Each call blocks.

A tier keeps each snapshot whole or not at all, under a key. A call has one of four outcomes: it
returns (a hit), or it raises SnapshotMiss, SnapshotDamaged, or TierRetry if the store can't answer
now. It never returns an empty value. Spill, which calls the tiers, has the threads, the retries,
the deadlines and the limits, once for all tiers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from kvtide.arena import HostArena
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom, Snapshot


class Tier(ABC):
    """A store below host memory. Inherit it and implement four methods; TierTests checks them.

    Several threads may call a tier at the same time. A key is any text; it is not a secret, but it
    is hostile: it must not become a path or a command.
    """

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether `get` would probably hit, without reading the snapshot. Raises TierRetry."""

    @abstractmethod
    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """Keeps a snapshot under a key, in place of what was there.

        `chunks` are its used bytes (`Snapshot.chunks`), which nobody changes meanwhile. When this
        returns the snapshot can be got. After an error the key has what it had before, the new
        snapshot, or nothing: each of them whole.
        Raises TierFull if the snapshot has no room even when others leave, TierRetry.
        """

    @abstractmethod
    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """Reads the snapshot of that key into memory that `make_room` gives, and checks it.

        Every byte was checked against the seal when this returns, and the seal was put with `key`.
        Raises SnapshotMiss if there is none; SnapshotDamaged if its bytes differ from the seal, and
        then the next `get` is a miss; TierRetry. After an error the memory has undefined contents.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Forgets the key. No error if it isn't there. Raises TierRetry."""

    @property
    def name(self) -> str:
        """What reports and metrics call this tier."""
        return type(self).__name__

    # ---- made of the four methods above --------------------------------------------------

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """`contains` of each key. A tier over a network overrides it to ask once for all."""
        return [self.contains(key) for key in keys]

    def save(self, key: str, snapshot: Snapshot) -> None:
        """Puts a snapshot, which stays valid.

        Raises the errors of `put`, and SnapshotMiss if the snapshot was discarded.
        """
        self.put(key, snapshot.seal, snapshot.chunks)

    def seal_of(self, key: str) -> Seal:
        """The seal of the snapshot of that key, without its bytes. Raises the errors of `get`."""
        try:
            return self.get(key, _give_no_room)
        except _NoRoom as found:
            return found.seal

    def load(self, key: str, arena: HostArena) -> Snapshot:
        """Gets the snapshot of that key into memory of an arena.

        Raises the errors of `get`, ArenaFull, and SnapshotMiss if a chunk is larger than the
        arena's blocks. After an error nothing is kept in the arena.
        """
        return Snapshot.fetch(arena, partial(self.get, key))


class _NoRoom(Exception):
    """Ends a `get` whose seal is known."""

    def __init__(self, seal: Seal) -> None:
        super().__init__()
        self.seal = seal


def _give_no_room(seal: Seal) -> list[memoryview]:
    raise _NoRoom(seal)
