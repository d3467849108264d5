"""Patience: asks a tier again when it can't answer, and then leaves it alone for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar, final

from kvtide.errors import TierRetry, first_line
from kvtide.tier.base import Tier

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAITS_S = (0.05, 0.2, 1.0)
"""How long to wait before each further try."""
REST_S = 30.0
"""How long a tier isn't asked again after the last try."""


@final
class Patience:
    """A tier as its callers see it: it answers, or raises TierRetry after some tries.

    Several threads may call it. Whoever asks while it rests gets TierRetry at once, so a broken
    disk costs one warning and no time.
    """

    def __init__(
        self, tier: Tier, *, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        """`clock` gives seconds; both are parameters for tests."""
        self.tier = tier
        self._clock = clock
        self._sleep = sleep
        self._rests_until = float("-inf")
        self._is_well = True

    @property
    def is_resting(self) -> bool:
        """Whether it would not be asked now."""
        return self._clock() < self._rests_until

    def ask(self, call: Callable[[], T]) -> T:
        """Calls the tier. Raises its errors, TierRetry only if further tries didn't help."""
        if self.is_resting:
            raise TierRetry("this tier had errors and isn't asked for a while")
        for wait_s in (*WAITS_S, None):
            try:
                result = call()
            except TierRetry as error:
                if wait_s is None or not self._is_well:  # a tier that was ill gets a single try
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
