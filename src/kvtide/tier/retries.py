"""RetriedTier: tries a call of a tier again when it fails, and then lets the tier rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

from kvtide.errors import TierRetry, first_line
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier.base import Tier
from kvtide.tier.counts import TierCounts

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAITS_S = (0.05, 0.2, 1.0)
"""Seconds to wait before each further try."""
REST_S = 30.0
"""Seconds for which a tier rests, which means that it isn't asked, after the last try."""


@final
class RetriedTier(Tier):
    """A tier whose calls raise TierRetry only after several tries.

    Then the tier rests: a call raises TierRetry at once, so a broken disk costs one warning and no
    time. Several threads may call it.
    """

    def __init__(
        self, tier: Tier, *, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """`clock` gives the time in seconds. Tests pass their own `clock` and `sleep`."""
        self.counts = TierCounts()
        """What its caller counts."""
        self._tier = tier
        self._clock = clock
        self._sleep = sleep
        self._rests_until = float("-inf")
        self._is_well = True

    @property
    def name(self) -> str:
        """See Tier."""
        return self._tier.name

    def contains(self, key: str) -> bool:
        """See Tier."""
        return self._tier.contains(key)

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        self._ask(partial(self._tier.put, key, seal, chunks))

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        return self._ask(partial(self._tier.get, key, make_room))

    def remove(self, key: str) -> None:
        """See Tier."""
        self._ask(partial(self._tier.remove, key))

    def seal_of(self, key: str) -> Seal:
        """See Tier."""
        return self._ask(partial(self._tier.seal_of, key))

    def _ask(self, call: Callable[[], T]) -> T:
        """Does a call of the tier. Raises its errors, but TierRetry only after all tries."""
        if self._clock() < self._rests_until:
            raise TierRetry("this tier had errors and isn't asked for a while")
        for wait_s in (*WAITS_S, None):
            try:
                result = call()
            except TierRetry as error:
                if wait_s is None or not self._is_well:  # a tier that has rested gets a single try
                    self._rest(error)
                    raise
                self._sleep(wait_s)
            else:
                self._note_well()
                return result
        raise AssertionError("the last try returns or raises")

    def _rest(self, error: TierRetry) -> None:
        self._rests_until = self._clock() + REST_S
        if self._is_well:
            self._is_well = False
            logger.warning("kvtide goes on without a tier until it answers: %s", first_line(error))

    def _note_well(self) -> None:
        if not self._is_well:
            self._is_well = True
            logger.warning("kvtide uses a tier again that had errors")
