"""Snapshot: what a request left behind, sealed. Ticket: a move under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

from kvtide.arena import Lease
from kvtide.device import Job
from kvtide.errors import SnapshotMiss

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Seal:
    """What must hold of a snapshot for its bytes to be restored.

    `fingerprint` is the geometry's, `key` whatever the caller needs to tell apart (model,
    revision, adapter, request), `checksums` are XXH3 64 of each chunk.
    """

    fingerprint: bytes
    key: str
    token_count: int
    chunk_tokens: int
    checksums: tuple[int, ...]


@final
@dataclass(slots=True)
class Snapshot:
    """All that some token slots owned, in host memory, in the order of those slots.

    It owns its memory until it is discarded (`Tide.discard`); the slots it came from don't
    matter any more.
    """

    seal: Seal
    lease: Lease
    readers: list[Ticket[None]] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        """Tokens in it; the slots that it is restored to must be as many."""
        return self.seal.token_count

    @property
    def size_bytes(self) -> int:
        """Host memory that it takes of the arena's limit; 0 once discarded."""
        return self.lease.size_bytes

    def check(self, *, fingerprint: bytes, key: str, token_count: int) -> None:
        """Raises SnapshotMiss unless this is a snapshot for just that target.

        The bytes themselves are checked against `checksums` by the mover, before it writes.
        """
        for name, sealed, wanted in (
            ("geometry", self.seal.fingerprint.hex(), fingerprint.hex()),
            ("key", self.seal.key, key),
            ("token count", self.seal.token_count, token_count),
        ):
            if sealed != wanted:
                raise SnapshotMiss(f"snapshot's {name} is {sealed!r}, the target's {wanted!r}")
        if self.lease.released:
            raise SnapshotMiss(f"snapshot of {self.token_count} tokens was discarded already")


@final
class Ticket(Generic[T]):
    """A move under way. The memory at both its ends belongs to it until it is settled.

    Only the thread that schedules may call its methods.
    """

    def __init__(
        self,
        job: Job[list[int]],
        *,
        succeed: Callable[[list[int]], T],
        fail: Callable[[], None] = lambda: None,
    ) -> None:
        """For Tide: `succeed` makes the result of the job's, `fail` gives back what it held."""
        self._job = job
        self._succeed = succeed
        self._fail = fail
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Whether the outcome is known to the books; doesn't ask the device."""
        return bool(self._result) or self._error is not None

    def done(self) -> bool:
        """Whether the move has ended, well or badly; doesn't block."""
        if not self.settled and self._job.done():
            self.settle()
        return self.settled

    def settle(self) -> None:
        """Blocks until the move has ended, and raises nothing: for whoever only needs its end."""
        if self.settled:
            return
        try:
            checksums = self._job.wait()
        except Exception as error:
            self._error = error
            self._fail()
        else:
            self._result.append(self._succeed(checksums))

    def wait(self) -> T:
        """Blocks until the move has ended; gives its result or raises its error, each time."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result[0]
