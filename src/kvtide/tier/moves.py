"""Move: brings a snapshot to the first tier that takes it, or from a tier back to the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

from kvtide.arena import Lease
from kvtide.device import Job
from kvtide.errors import KvtideError, SnapshotDamaged, SnapshotMiss, TierFull
from kvtide.seal import Seal
from kvtide.tier.namespace import is_shared
from kvtide.tier.retries import RetriedTier
from kvtide.tier.workers import Workers


@final
class Move:
    """A move of a snapshot, down to one of `tiers`, or up from the only one into `room`.

    A worker does `down` or `up`, unless the tier hangs by then, and notes what Spill's thread reads
    when the job has ended. Only `tier` is also read before.
    """

    def __init__(
        self,
        key: str,
        seal: Seal,
        tiers: Sequence[RetriedTier],
        clock: Callable[[], float],
        room: Lease | None = None,
    ) -> None:
        self.room = room
        """The memory into which it is read; None for a move down."""
        asked = tiers if room is not None else [tier for tier in tiers if tier.takes]
        self.tier: RetriedTier | None = next(iter(asked), None)
        """Whom it asks: at the end who took the snapshot, or gave it back."""
        self.refusals: list[tuple[RetriedTier, KvtideError]] = []
        """Who didn't take it, and why."""
        self.seconds = 0.0
        """How long it took, with all tries."""
        self.was_there = False
        """Whether the tier had these bytes already, so that nothing was written."""
        self.is_late = False
        """Whether a caller waited for it up to the deadline, in vain. It may still end."""
        self._key = key
        self._seal = seal
        self._tiers = tiers
        self._clock = clock
        self._job: Job[Any] | None = None
        self._read_at: float | None = None
        """When a worker began to read."""

    @property
    def job(self) -> Job[Any]:
        """The work of its worker."""
        assert self._job is not None, "a move that was started"
        return self._job

    def is_hung_read(self, deadline_s: float) -> bool:
        """Whether it has been read for longer than that, and nobody has noted that it is late.

        Nobody may ever wait for a read ahead; for a write somebody does, who needs its memory.
        """
        began = self._read_at
        return began is not None and not self.is_late and self._clock() - began > deadline_s

    def start(self, workers: Workers, work: Callable[[], None], memory: Lease) -> None:
        """Gives `work` to a worker. The lease keeps its blocks until that has ended."""
        self._job = workers.start(work)
        memory.use(self._job)

    def down(self, chunks: Sequence[memoryview]) -> None:
        """In a worker: gives the snapshot to the first tier that takes it."""
        error: KvtideError = TierFull("there is no tier below the arena")
        for tier in self._tiers:
            started, self.tier = self._clock(), tier
            try:
                self.was_there = self._is_there(tier)
                if not self.was_there:
                    tier.put(self._key, self._seal, chunks)
                self.seconds = self._clock() - started
                return
            except KvtideError as refusal:
                self.refusals.append((tier, refusal))
                error = refusal
        raise error

    def _is_there(self, tier: RetriedTier) -> bool:
        """Whether the tier has these bytes already, since another request or process put them."""
        with suppress(SnapshotMiss, SnapshotDamaged):  # then they are written
            if is_shared(self._key) and tier.contains(self._key):
                return tier.seal_of(self._key) == self._seal
        return False

    def up(self, views: list[memoryview]) -> None:
        """In a worker: fills `views` with the snapshot's bytes."""
        assert self.tier is not None, "what isn't in the arena is in a tier"
        started = self._read_at = self._clock()

        def make_room(seal: Seal) -> list[memoryview]:
            if seal != self._seal:
                raise SnapshotMiss("the tier has another snapshot under this key")
            return views

        self.tier.get(self._key, make_room)
        self.seconds = self._clock() - started


def too_late(deadline_s: float) -> TimeoutError:
    """The error of a tier that took longer than the deadline."""
    return TimeoutError(f"no answer in {deadline_s} s")
