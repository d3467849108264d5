"""Simulated tiers, workers and time: a run of many steps follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.device import Job
from kvtide.errors import SnapshotDamaged, SnapshotMiss, TierFull, TierRetry
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import Tier


class Clock:
    """Time that passes only where the simulation says so; it may jump."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedJob:
    """Work that is done when the simulation gets to it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: list[Any] = []
        self._error: BaseException | None = None
        self.is_hung = False

    def done(self) -> bool:
        return bool(self._result) or self._error is not None

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except Exception as error:
            self._error = error

    def wait(self) -> Any:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._result[0]


class SimulatedWorkers:
    """Does its work in a random order, some of it late or never within a deadline."""

    def __init__(self, chance: random.Random, clock: Clock, hang_share: float = 0.0) -> None:
        self._chance = chance
        self._clock = clock
        self.hang_share = hang_share
        self.jobs: list[SimulatedJob] = []

    def start(self, work: Callable[[], Any]) -> SimulatedJob:
        job = SimulatedJob(work)
        job.is_hung = self._chance.random() < self.hang_share
        self.jobs.append(job)
        return job

    def settle(self, job: Job[Any], timeout_s: float) -> bool:
        assert isinstance(job, SimulatedJob)
        while not job.done() and self.step():
            pass
        if not job.done():
            self._clock.now += timeout_s
        return job.done()

    def step(self) -> bool:
        """Does a piece of work that doesn't hang; False if there is none."""
        ready = [job for job in self.jobs if not job.is_hung]
        if ready:
            job = self._chance.choice(ready)
            self.jobs.remove(job)
            job.run()
        return bool(ready)

    def wake(self) -> None:
        """Hung work may go on."""
        for job in self.jobs:
            job.is_hung = False

    def close(self, patience_s: float = 0.0) -> None:
        self.wake()
        while self.step():
            pass


class FaultyTier(Tier):
    """Keeps copies in memory, within a limit, and has all faults that a disk or a network has."""

    def __init__(self, chance: random.Random, limit_bytes: int, fault_share: float = 0.0) -> None:
        self._chance = chance
        self.limit_bytes = limit_bytes
        self.fault_share = fault_share
        self.is_away = self.refuses_writes = False
        self.is_silent = False
        """Whether it writes and doesn't say so."""
        self.keeps_used = False
        """Whether a full one refuses what is new; otherwise the oldest leaves."""
        self.bad_keys: set[str] = set()
        """Keys that can't be read now."""
        self.kept: dict[str, tuple[Seal, list[bytes]]] = {}

    @property
    def used_bytes(self) -> int:
        return sum(sum(map(len, chunks)) for _, chunks in self.kept.values())

    def contains(self, key: str) -> bool:
        return key in self.kept

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        fault = self._fault(
            "away before", "away after", "lost at once", "torn", "flipped", "another key's", "full"
        )
        if fault == "away before" or self.refuses_writes:
            raise TierRetry("simulated: away, or can only be read")
        seal, copy = self._kept_form(seal, [bytes(chunk) for chunk in chunks], fault)
        size_bytes = sum(map(len, copy))
        if size_bytes > self.limit_bytes or fault == "full":
            raise TierFull("simulated: full")
        self.kept.pop(key, None)
        if self.keeps_used and self.used_bytes + size_bytes > self.limit_bytes:
            raise TierFull("simulated: full of what is used")
        while self.used_bytes + size_bytes > self.limit_bytes:
            del self.kept[next(iter(self.kept))]
        if fault != "lost at once":
            self.kept[key] = (seal, copy)
        if fault == "away after" or self.is_silent:
            raise TierRetry("simulated: no answer, though it was written")

    def _kept_form(
        self, seal: Seal, copy: list[bytes], fault: str | None
    ) -> tuple[Seal, list[bytes]]:
        """What is kept of a snapshot: something else with some faults."""
        if fault == "another key's" and self.kept:
            return self._chance.choice(list(self.kept.values()))
        if fault == "torn" and copy:
            copy = [*copy[:-1], copy[-1][: len(copy[-1]) // 2]]
        if fault == "flipped" and copy:
            content = bytearray(copy[0])
            content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
            copy = [bytes(content), *copy[1:]]
        return seal, copy

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        fault = self._fault("away", "lost", "half read")
        if fault == "away" or key in self.bad_keys:
            raise TierRetry("simulated: away")
        if fault == "lost" or key not in self.kept:
            self.kept.pop(key, None)
            raise SnapshotMiss("simulated: lost")
        seal, chunks = self.kept[key]
        rooms = make_room(seal)
        for room, chunk in zip(rooms, chunks, strict=True):
            size_bytes = len(chunk) // 2 if fault == "half read" else len(chunk)
            room[:size_bytes] = chunk[:size_bytes]
        if fault == "half read":
            raise TierRetry("simulated: the line broke")
        try:
            if [len(chunk) for chunk in chunks] != list(seal.used_bytes):
                raise SnapshotDamaged("simulated: torn")
            seal.check_bytes(rooms)
        except SnapshotDamaged:
            del self.kept[key]
            raise
        return seal

    def remove(self, key: str) -> None:
        if self._fault("away") is not None:
            raise TierRetry("simulated: away")
        self.kept.pop(key, None)

    def _fault(self, *names: str) -> str | None:
        if self.is_away:
            raise TierRetry("simulated: away")
        return self._chance.choice(names) if self._chance.random() < self.fault_share else None
