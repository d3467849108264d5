"""TierStack: several tiers for the same blocks, as one tier. The nearest is asked first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from kvtide.errors import (
    KvtideError,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
)
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import Tier
from kvtide.tier.retries import RetriedTier


@final
class TierStack(Tier):
    """A block is put into all tiers, and got from the first that has it whole.

    A tier that fails rests for a while, and the others go on: see RetriedTier.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """`tiers` are at least one, the nearest first. Who opened them closes them."""
        self._tiers = [RetriedTier(tier, clock=time.monotonic, sleep=time.sleep) for tier in tiers]

    def contains(self, key: str) -> bool:
        """See Tier. A tier that can't answer contains nothing."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """See Tier. A tier that can't answer contains nothing."""
        found = dict.fromkeys(keys, False)
        for tier in self._tiers:
            left = [key for key, is_there in found.items() if not is_there]
            with suppress(TierRetry):
                found.update(zip(left, tier.contains_each(left), strict=True))
        return [found[key] for key in keys]

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
