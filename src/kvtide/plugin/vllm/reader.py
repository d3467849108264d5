"""TierReader: brings blocks from a tier to host memory, in threads of its own, and checks them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from kvtide.arena import Lease
from kvtide.device.threads import QueuedJob
from kvtide.errors import KvtideError, SnapshotDamaged, first_line
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot, chunk_views
from kvtide.tier import Tier
from kvtide.tier.workers import ThreadWorkers

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    """A read into a lease of one block, under way or waiting for a thread."""

    job: QueuedJob[Seal]
    lease: Lease
    began: list[float]
    """When a thread began with it; empty before that."""


class Fetched(NamedTuple):
    """A block that came, or didn't, and whether the tier's was damaged."""

    key: bytes
    snapshot: Snapshot | None
    is_damaged: bool


@final
class TierReader:
    """Reads blocks of a tier, each at most `deadline_s`; until a late read ends none begins.

    Not thread-safe: the worker's thread calls.
    """

    def __init__(
        self,
        tier: Tier,
        workers: ThreadWorkers,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._workers = workers
        self._deadline_s = deadline_s
        self._clock = clock
        self._fetches: dict[bytes, _Fetch] = {}
        self._late: list[_Fetch] = []
        self._withdrawn: list[_Fetch] = []
        """Reads that go on although nobody wants the block: they may be late, too."""

    def begin(self, key: bytes, group: BlockGroup, name: str, lease: Lease) -> bool:
        """Begins to read the block of that name into the lease; False if the tier hangs."""
        self._look_at_withdrawn()
        self._late = [fetch for fetch in self._late if not fetch.job.done()]
        if self._late:
            return False
        began: list[float] = []

        def get() -> Seal:
            began.append(self._clock())
            return _get(self._tier, group, name, lease)

        job = self._workers.start(get)
        lease.use(job)
        self._fetches[key] = _Fetch(job, lease, began)
        return True

    def wait(self, at_most_s: float) -> None:
        """Blocks until all reads have ended, or for so long."""
        until = time.monotonic() + at_most_s
        for fetch in self._fetches.values():
            if not fetch.job.settle(max(0.0, until - time.monotonic())):
                return

    def withdraw(self, key: bytes) -> None:
        """Nobody wants the block any more. Its memory is free when the read has ended."""
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            if not fetch.job.cancel():
                self._withdrawn.append(fetch)
            fetch.lease.release()

    def withdraw_all(self) -> None:
        """Nobody wants any block any more."""
        for key in tuple(self._fetches):
            self.withdraw(key)

    def take_ended(self) -> Iterator[Fetched]:
        """The reads that have ended since the last call, or take too long.

        One that takes too long keeps its thread, so those that wait for a thread end with it.
        """
        self._look_at_withdrawn()
        for key, fetch in list(self._fetches.items()):
            if fetch.job.done():
                found = self._found(key, fetch)
            elif self._is_late(fetch) or (self._late and fetch.job.cancel()):
                found = Fetched(key, None, False)
            else:
                continue
            del self._fetches[key]
            if found.snapshot is None:
                fetch.lease.release()
            yield found

    def close(self) -> None:
        """Ends the threads; waits for those that read, together at most `deadline_s`."""
        self.withdraw_all()
        self._workers.close(self._deadline_s)

    def _look_at_withdrawn(self) -> None:
        """Forgets withdrawn reads that have ended or are late."""
        going_on = [fetch for fetch in self._withdrawn if not fetch.job.done()]
        self._withdrawn = [fetch for fetch in going_on if not self._is_late(fetch)]

    def _is_late(self, fetch: _Fetch) -> bool:
        """Whether a thread has read for too long. From now on no read begins until it ends."""
        if not fetch.began or self._clock() - fetch.began[0] <= self._deadline_s:
            return False
        logger.warning("kvtide: a tier gave no answer in %.1f s", self._deadline_s)
        self._late.append(fetch)
        return True

    def _found(self, key: bytes, fetch: _Fetch) -> Fetched:
        """What a read that has ended brought."""
        is_damaged = False
        try:
            return Fetched(key, Snapshot(fetch.job.wait(), fetch.lease), False)
        except SnapshotDamaged as error:
            logger.warning("kvtide: a block in a tier is damaged: %s", first_line(error))
            is_damaged = True
        except KvtideError as error:
            logger.debug("kvtide: no block in a tier: %s", first_line(error))
        except Exception:
            logger.exception("kvtide: a tier failed")
        return Fetched(key, None, is_damaged)


def _get(tier: Tier, group: BlockGroup, name: str, lease: Lease) -> Seal:
    """In a thread: reads a block into its lease."""

    def make_room(seal: Seal) -> list[memoryview]:
        group.check(seal, name)
        return chunk_views(lease, seal)

    return tier.get(name, make_room)
