"""TierReader: brings blocks from a tier to host memory, in threads of its own, and checks them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

from kvtide.arena import Lease
from kvtide.errors import KvtideError, SnapshotDamaged, first_line
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.timely import TimelyJob, TimelyThreads
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot, chunk_views
from kvtide.tier import Tier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    """A read into a lease of one block, under way or waiting for a thread."""

    job: TimelyJob[Seal]
    lease: Lease


class Fetched(NamedTuple):
    """A block that came, or didn't, and whether the tier's was damaged."""

    key: bytes
    snapshot: Snapshot | None
    is_damaged: bool


@final
class TierReader:
    """Reads blocks of a tier. One that takes too long isn't there, nor are others meanwhile.

    Not thread-safe: the worker's thread calls.
    """

    def __init__(self, tier: Tier, threads: TimelyThreads) -> None:
        self._tier = tier
        self._threads = threads
        self._fetches: dict[bytes, _Fetch] = {}

    def begin(self, key: bytes, group: BlockGroup, name: str, lease: Lease) -> bool:
        """Begins to read the block of that name into the lease; False if the tier hangs."""
        job = self._threads.start(partial(_get, self._tier, group, name, lease))
        if job is None:
            return False
        lease.use(job)
        self._fetches[key] = _Fetch(job, lease)
        return True

    def wait(self, at_most_s: float) -> None:
        """Blocks until all reads have ended, or for so long."""
        self._threads.wait((fetch.job for fetch in self._fetches.values()), at_most_s)

    def withdraw(self, key: bytes) -> None:
        """Nobody wants the block any more. Its memory is free when the read has ended."""
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            self._threads.drop(fetch.job)
            fetch.lease.release()

    def withdraw_all(self) -> None:
        """Nobody wants any block any more."""
        for key in tuple(self._fetches):
            self.withdraw(key)

    def take_ended(self) -> Iterator[Fetched]:
        """The reads that have ended since the last call, or have failed since they take too long.

        Their memory is free when the tier has let it go.
        """
        for key, fetch in list(self._fetches.items()):
            if fetch.job.done():
                found = self._found(key, fetch)
            elif self._threads.has_failed(fetch.job):
                found = Fetched(key, None, False)
            else:
                continue
            del self._fetches[key]
            if found.snapshot is None:
                fetch.lease.release()
            yield found

    def close(self) -> None:
        """Ends the threads; waits a while for those that read."""
        self.withdraw_all()
        self._threads.close()

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
