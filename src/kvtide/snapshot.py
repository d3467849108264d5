"""Snapshot: what a request left behind, sealed. Ticket: a move under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

import numpy as np

from kvtide.arena import Lease
from kvtide.device import Job
from kvtide.errors import SnapshotMiss, to_keep, to_raise
from kvtide.layout import Ids, Rows

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Seal:
    """What must hold of a snapshot for its bytes to be restored.

    `fingerprint` is the geometry's, `key` whatever the caller needs to tell apart (model,
    revision, adapter, request), `checksums` are XXH3 64 of each chunk, or of the pieces of a large
    one. `tokens` says for each group of planes which tokens of the request have rows, as ranges:
    all of them, or those of a window, or of a rank; a row of several tokens is there with its first
    one, and in `lasts` with its last.
    """

    fingerprint: bytes
    key: str
    token_count: int
    tokens: tuple[tuple[range, ...], ...]
    chunk_bytes: int
    checksums: tuple[int, ...]
    lasts: tuple[tuple[range, ...], ...] = ()

    def tokens_of(self, group: int) -> Ids:
        """The first token of each row in that group of planes, int64 [row]."""
        return _numbers(self.tokens[group])

    def lasts_of(self, group: int) -> Ids:
        """The last token of each row in that group of planes, int64 [row]."""
        return _numbers(self.lasts[group])


def _numbers(ranges: Sequence[range]) -> Ids:
    parts = [np.arange(one.start, one.stop, one.step) for one in ranges]
    return np.concatenate([np.empty(0, np.int64), *parts])


def ranges_of(tokens: Ids | None) -> tuple[range, ...]:
    """Ascending token numbers, int64 [row], as ranges; none for None."""
    if tokens is None or not tokens.size:
        return ()
    if tokens[-1] - tokens[0] == tokens.size - 1:
        return (range(int(tokens[0]), int(tokens[-1]) + 1),)
    steps = np.diff(tokens)
    ranges: list[range] = []
    first = 0
    while first < tokens.size:
        step = int(steps[first]) if first < steps.size else 1
        same = np.flatnonzero(steps[first:] != step)
        stop = first + int(same[0]) + 1 if same.size else tokens.size
        ranges.append(range(int(tokens[first]), int(tokens[stop - 1]) + 1, step))
        first = stop
    return tuple(ranges)


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

    def rows_in(self, group: int, target: Rows, *, keep_extra_rows: bool = False) -> Ids:
        """Those of `target`'s rows that this snapshot's rows of a group go to, in its order.

        Raises SnapshotMiss where a token that has a row here has none there, or where tokens that
        share a row here are in two there: what they owned would be lost. Also where a token that
        has a row there has none here: that row would keep another request's bytes, which
        `keep_extra_rows` says is meant.
        """
        if self.seal.tokens[group] == ranges_of(target.tokens):
            return target.ids  # token for token, as mostly
        tokens = self.seal.tokens_of(group)
        found = target.of_tokens(tokens)
        if found is None:
            missing = tokens[~np.isin(tokens, target.tokens)][0]
            raise SnapshotMiss(
                f"snapshot has a row for token {missing} of {self.token_count}, the target none: "
                "its window, or its share of the context, is another one"
            )
        if target.lasts is not None and tokens.size:
            begun = target.tokens[(target.tokens > tokens[0]) & ~np.isin(target.tokens, tokens)]
            holder = np.searchsorted(tokens, begun) - 1
            begun = begun[begun <= self.seal.lasts_of(group)[holder]]
            if begun.size:
                raise SnapshotMiss(
                    f"the target begins a row at token {begun[0]}, the snapshot has that token in "
                    "a row with others; restore to slots that fill rows as those it is from did"
                )
        if found.size < target.tokens.size and not keep_extra_rows:
            extra = target.tokens[~np.isin(target.tokens, tokens)][0]
            raise SnapshotMiss(
                f"the target has a row for token {extra} of {self.token_count}, the snapshot none: "
                "it would keep another request's bytes; map that token to no row, or say that "
                "this is meant by keep_extra_rows=True"
            )
        return found


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
        forget: Callable[[Ticket[T]], None] = lambda _: None,
    ) -> None:
        """For Tide: `succeed` makes the result of the job's, `fail` gives back what it held, and
        `forget` is told once the outcome is known. They are repeatable."""
        self._job = job
        self._succeed = succeed
        self._fail = fail
        self._forget = forget
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
        except BaseException as error:
            if not self._raises_again(type(error)):
                raise  # a signal handler's: it ended the wait alone
            self._fail()
            self._error = to_keep(error)
        else:
            self._result.append(self._succeed(checksums))
        self._forget(self)
        del self._succeed, self._fail, self._forget  # and what they hold

    def _raises_again(self, kind: type[BaseException]) -> bool:
        """Whether an error is the job's own, which comes each time it is asked."""
        try:
            if self._job.done():
                self._job.wait()
        except kind:
            return True
        return False

    def wait(self) -> T:
        """Blocks until the move has ended; gives its result or raises its error, each time."""
        self.settle()
        if self._error is not None:
            raise to_raise(self._error)
        return self._result[0]
