"""TierStack: several tiers for the same blocks, as one tier. The nearest is asked first.

TimelyLookups asks such a tier what it has, within a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import final

from kvtide.device import Job
from kvtide.errors import (
    KvtideError,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
    first_line,
)
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import Tier
from kvtide.tier.retries import RetriedTier
from kvtide.tier.workers import Workers

logger = logging.getLogger(__name__)


@final
class TierStack(Tier):
    """A block is put into all tiers, and got from the first that has it whole.

    A tier that fails rests for a while, and the others go on: see RetriedTier.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """`tiers` are at least one, the nearest first. Who opened them closes them."""
        self._tiers = [RetriedTier(tier, clock=time.monotonic, sleep=time.sleep) for tier in tiers]

    def contains(self, key: str) -> bool:
        """See Tier. Raises TierRetry only if no tier can answer."""
        failure: TierRetry | None = None
        for tier in self._tiers:
            try:
                if tier.contains(key):
                    return True
            except TierRetry as error:
                failure = error
        if failure is not None and len(self._tiers) == 1:
            raise failure
        return False

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier. Raises a tier's error only if no tier took the block."""
        failure: KvtideError = TierFull("there is no tier")
        has_taken = False
        for tier in self._tiers:
            try:
                tier.put(key, seal, chunks)
                has_taken = True
            except (TierFull, TierRetry) as error:
                failure = error
        if not has_taken:
            raise failure

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier. A block that is damaged in one tier may be whole in the next."""
        failure: KvtideError = SnapshotMiss(f"no tier has {key!r}; recompute this request")
        for tier in self._tiers:
            try:
                return tier.get(key, make_room)
            except (SnapshotMiss, TierRetry, SnapshotDamaged) as error:
                if not isinstance(failure, SnapshotDamaged) and not isinstance(error, SnapshotMiss):
                    failure = error
        raise failure

    def remove(self, key: str) -> None:
        """See Tier. What a tier can't remove now it removes later."""
        for tier in self._tiers:
            with suppress(TierRetry):
                tier.remove(key)


@final
class TimelyLookups:
    """Asks a tier what it has, each time for `deadline_s` at most.

    A tier that gave no answer in time has nothing until it has given it. One thread calls.
    """

    def __init__(self, tier: Tier, workers: Workers, deadline_s: float) -> None:
        self._tier = tier
        self._workers = workers
        self._deadline_s = deadline_s
        self._late: Job[bool] | None = None

    def contains(self, key: str) -> bool:
        """Whether the tier says in time that it has the key. Never raises a KvtideError."""
        if self._late is not None and not self._late.done():
            return False
        self._late = None
        job = self._workers.start(partial(self._tier.contains, key))
        if not self._workers.settle(job, self._deadline_s):
            logger.warning("kvtide: a tier gave no answer in %.1f s", self._deadline_s)
            self._late = job
            return False
        try:
            return bool(job.wait())
        except KvtideError as error:
            logger.debug("kvtide: a tier couldn't be asked: %s", first_line(error))
            return False

    def close(self) -> None:
        """Ends the thread; waits for an answer that is late for `deadline_s` at most."""
        self._workers.close(self._deadline_s)
