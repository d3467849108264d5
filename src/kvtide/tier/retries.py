"""RetriedTier: tries a call of a tier again when it fails, and then lets the tier rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final

from kvtide.device import Job
from kvtide.errors import KvtideError, TierFull, TierRetry, first_line
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
SLOW_S = 2.0
"""Seconds after which a call that fails isn't tried again: others may wait for it meanwhile.

A call of Mooncake's client takes about 4 seconds to say that no master is there, measured with
the wheel of 0.3.13."""
_MOST_LEFTOVERS = 1 << 16


class _Side:
    """How well a tier takes snapshots, or gives them back: a disk may do one and not the other."""

    def __init__(self) -> None:
        self.rests_until = float("-inf")
        self.is_well = True
        self.failed_key: str | None = None
        """The key of the last call, if that failed."""


@final
class RetriedTier(Tier):
    """A tier whose calls raise TierRetry only after several tries.

    When calls for two keys in a row have failed, one side of the tier rests, its reads or its
    writes: such a call raises TierRetry at once. So a broken disk costs one warning and no time, a
    disk that can only be read is read, and a bad place on a disk costs one snapshot. A tier that
    hangs isn't asked at all, until it has answered. Errors that aren't kvtide's are errors of the
    tier's. What it can't remove is removed later. Several threads may call it.
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
        self._reads, self._writes = _Side(), _Side()
        self._late: list[Job[Any]] = []
        self._tidying = threading.Lock()
        self._leftovers: dict[str, None] = {}
        """Keys that may have something which nobody wants any more; the oldest first."""

    @property
    def name(self) -> str:
        """See Tier."""
        return self._tier.name

    @property
    def is_hung(self) -> bool:
        """Whether a call still hasn't ended for which somebody waited in vain."""
        return any(not job.done() for job in self._late)

    @property
    def takes(self) -> bool:
        """Whether it would be asked to take a snapshot now."""
        return self._is_awake(self._writes)

    def note_late(self, job: Job[Any]) -> None:
        """Says that somebody waited in vain for this job, which asks the tier."""
        self._late = [*(other for other in self._late if not other.done()), job]

    def contains(self, key: str) -> bool:
        """See Tier. A tier that isn't asked contains nothing."""
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        """See Tier. A tier that isn't asked contains nothing."""
        if not keys or not self._is_awake(self._reads):
            return [False] * len(keys)
        return self._ask(self._reads, keys[0], partial(self._tier.contains_each, keys))

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier. What a write that failed may have left is removed later."""
        with self._tidying:  # what is being removed may have this key
            was_unwanted = key in self._leftovers
            self._leftovers.pop(key, None)
        tries: list[None] = []

        def put() -> None:
            tries.append(None)
            self._tier.put(key, seal, chunks)

        try:
            self._ask(self._writes, key, put)
        except KvtideError as error:
            is_clean = len(tries) == 1 and isinstance(error, TierFull)
            if was_unwanted or (tries and not is_clean):
                self.forget(key)
            raise
        self._remove_leftover()

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        return self._ask(self._reads, key, partial(self._tier.get, key, make_room))

    def remove(self, key: str) -> None:
        """See Tier. After an error it is tried again later."""
        self.forget(key)
        self.tidy(key)
        self._remove_leftover()

    def forget(self, key: str) -> None:
        """Says that nobody wants what is under a key. Doesn't block: `tidy` removes it later.

        A put of the key that begins before that ends the matter.
        """
        if len(self._leftovers) < _MOST_LEFTOVERS:
            self._leftovers[key] = None

    def seal_of(self, key: str) -> Seal:
        """See Tier."""
        return self._ask(self._reads, key, partial(self._tier.seal_of, key))

    def _is_awake(self, side: _Side) -> bool:
        return self._clock() >= side.rests_until and not self.is_hung

    def _ask(self, side: _Side, key: str, call: Callable[[], T]) -> T:
        """Does a call of the tier. Raises its errors, but TierRetry only after all tries."""
        if not self._is_awake(side):
            raise TierRetry(
                f"the tier {self.name!r} had errors or hangs, and isn't asked for a while"
            )
        for wait_s in (*WAITS_S, None):
            began = self._clock()
            try:
                result = _call(self.name, call)
            except TierRetry as error:
                was_slow = self._clock() - began > SLOW_S
                if wait_s is None or was_slow or not side.is_well:  # after a rest it gets one try
                    self._note_failure(side, key, error)
                    raise
                self._sleep(wait_s)
            else:
                self._note_success(side)
                return result
        raise AssertionError("the last try returns or raises")

    def _note_failure(self, side: _Side, key: str, error: TierRetry) -> None:
        is_first = side.failed_key in (None, key)
        side.failed_key = key
        if is_first and side.is_well:
            return
        side.rests_until = self._clock() + REST_S
        was_well, side.is_well = self._is_well, False
        if was_well:
            logger.warning(
                "kvtide goes on without the tier %r where that fails, until it answers: %s",
                self.name,
                first_line(error),
            )

    def _note_success(self, side: _Side) -> None:
        side.failed_key = None
        was_well, side.is_well = self._is_well, True
        if not was_well and self._is_well:
            logger.warning("kvtide uses the tier %r again, which had errors", self.name)

    @property
    def _is_well(self) -> bool:
        return self._reads.is_well and self._writes.is_well

    def tidy(self, *keys: str) -> None:
        """Removes what nobody wants of these keys, of all without keys. Raises TierRetry."""
        for key in keys or tuple(self._leftovers):
            self._ask(self._writes, key, partial(self._remove_unwanted, key))

    def _remove_leftover(self) -> None:
        """Removes one of the keys that may have something left: after each write that went well."""
        # Without a lock the first key may vanish. After an error it is tried again later.
        with suppress(KvtideError, StopIteration, RuntimeError):
            key = next(iter(self._leftovers))
            _call(self.name, partial(self._remove_unwanted, key))

    def _remove_unwanted(self, key: str) -> None:
        with self._tidying:
            if key in self._leftovers:
                self._tier.remove(key)
                self._leftovers.pop(key, None)


def _call(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except KvtideError:
        raise
    except Exception as error:
        raise TierRetry(f"the tier {name!r} failed: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What an error says, without the name of a file: a server's log shall have none."""
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}"
    return first_line(error)


def counts_by_name(tiers: Sequence[RetriedTier]) -> dict[str, TierCounts]:
    """The counts of tiers by their names. A second one of a name gets a number."""
    found: dict[str, TierCounts] = {}
    for number, tier in enumerate(tiers):
        found[tier.name if tier.name not in found else f"{tier.name}_{number}"] = tier.counts
    return found
