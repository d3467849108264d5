"""TierWriter: writes blocks from host memory to a tier, in threads of its own.

The threads find the next block themselves, since vLLM's scheduler doesn't call anybody while no
request runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from typing import Any, final

from kvtide.device import Job
from kvtide.errors import KvtideError, first_line
from kvtide.snapshot import Snapshot
from kvtide.tier import Tier
from kvtide.tier.workers import Workers

logger = logging.getLogger(__name__)


@final
class _Write:
    """A write that is due or under way, as a Job: the block's memory isn't given away meanwhile."""

    def __init__(self, name: str, snapshot: Snapshot) -> None:
        self.name = name
        self.snapshot = snapshot
        self.has_ended = False

    def done(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        raise AssertionError("nobody waits for a single write: see TierWriter.close")


@final
class TierWriter:
    """Writes what it is offered, what was offered first at first, `at_once` blocks side by side."""

    def __init__(self, tier: Tier, workers: Workers, at_once: int, deadline_s: float) -> None:
        self._tier = tier
        self._workers = workers
        self._at_once = at_once
        self._deadline_s = deadline_s
        self._change = threading.Lock()  # held for changes of the fields below, never for long
        self._due: OrderedDict[str, _Write] = OrderedDict()
        self._running = 0
        self._jobs: list[Job[Any]] = []
        self._counts: Counter[str] = Counter()

    def offer(self, name: str, snapshot: Snapshot) -> None:
        """Writes the block under that name, unless it is withdrawn before."""
        write = _Write(name, snapshot)
        # Here and not in the write's thread: only one thread may tell a lease of moves.
        snapshot.lease.use(write)
        with self._change:
            if (replaced := self._due.pop(name, None)) is not None:
                replaced.has_ended = True
            self._due[name] = write
            if self._running >= self._at_once:
                return
            self._running += 1
        self._jobs = [job for job in self._jobs if not job.done()]
        self._jobs.append(self._workers.start(self._work))

    def withdraw(self, name: str) -> None:
        """The block is about to leave host memory: it isn't written, or the write goes on."""
        with self._change:
            if (write := self._due.pop(name, None)) is not None:
                write.has_ended = True
                self._counts["unwritten_blocks"] += 1

    def close(self) -> None:
        """Ends the threads when all blocks are written, at most after `deadline_s`."""
        ends_at = time.monotonic() + self._deadline_s
        for job in self._jobs:
            self._workers.settle(job, max(0.0, ends_at - time.monotonic()))
        with self._change:
            self._counts["unwritten_blocks"] += len(self._due)
            for write in self._due.values():
                write.has_ended = True
            self._due.clear()
        self._workers.close(max(0.0, ends_at - time.monotonic()))

    def take_counts(self) -> Counter[str]:
        """What has happened since the last call."""
        with self._change:
            counts, self._counts = self._counts, Counter()
        return counts

    def _work(self) -> None:
        """In a thread: writes one block after the other, until none is due."""
        while (write := self._next()) is not None:
            outcome = "failed_writes"
            try:
                self._tier.put(write.name, write.snapshot.seal, write.snapshot.chunks)
                outcome = "written_blocks"
            except KvtideError as error:
                logger.debug("kvtide: a block wasn't written: %s", first_line(error))
            except Exception:
                logger.exception("kvtide: a tier failed")
            finally:
                with self._change:
                    write.has_ended = True
                    self._counts[outcome] += 1

    def _next(self) -> _Write | None:
        with self._change:
            if not self._due:
                self._running -= 1
                return None
            return self._due.popitem(last=False)[1]
