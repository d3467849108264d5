"""Simulated tiers, workers and time: a run of many steps follows from its seed alone."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvtide.device import Job
from kvtide.errors import KvtideError, SnapshotDamaged, SnapshotMiss, TierFull, TierRetry
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


class Hang(BaseException):
    """Ends a call that hangs in a tier. The job isn't done before `finish` has been called."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self.finish = finish


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
        except Hang as hang:
            self._work, self.is_hung = hang.finish, True
        except Exception as error:
            self._error = error

    def wait(self) -> Any:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._result[0]


class SimulatedWorkers:
    """Does its work in a random order, some of it never within a deadline."""

    def __init__(self, chance: random.Random, clock: Clock) -> None:
        self._chance = chance
        self._clock = clock
        self.jobs: list[SimulatedJob] = []

    def start(self, work: Callable[[], Any]) -> SimulatedJob:
        job = SimulatedJob(work)
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
            job.run()
            if job.done():
                self.jobs.remove(job)
        return bool(ready)

    def wake(self) -> None:
        """Hung work may go on."""
        for job in self.jobs:
            job.is_hung = False

    def close(self, patience_s: float = 0.0) -> None:
        self.wake()
        while self.step():
            pass


class Below(Protocol):
    """A tier, and what goes wrong below it: `fault_share` of its calls fail."""

    fault_share: float

    @property
    def tier(self) -> Tier: ...

    @property
    def used_bytes(self) -> int: ...

    def check(self) -> None: ...

    def harm(self) -> None: ...

    def left(self) -> list[str]: ...

    def close(self) -> None: ...


class Unsteady(Tier):
    """A tier whose calls are slow, hang, come twice, or fail with errors of the system's.

    A call that hangs has done its work, or does it when it goes on: after its caller gave up.
    """

    def __init__(
        self,
        below: Below,
        chance: random.Random,
        clock: Clock,
        fault_share: float = 0.0,
    ) -> None:
        """`below` doesn't fail when it goes on after a hang."""
        self._tier = below.tier
        self._below = below
        self._chance = chance
        self._clock = clock
        self.fault_share = fault_share
        self.hang_share = 0.0

    @property
    def name(self) -> str:
        """See Tier."""
        return self._tier.name

    def contains(self, key: str) -> bool:
        return self._tier.contains(key)

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        def put() -> None:
            self._tier.put(key, seal, chunks)

        def finish() -> None:
            try:
                put()
            except KvtideError:  # whoever tries again would remove what earlier tries left
                self._tier.remove(key)
                raise

        self._do(put, finish)

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        seal: Seal = self._do(lambda: self._tier.get(key, make_room))
        return seal

    def remove(self, key: str) -> None:
        self._do(lambda: self._tier.remove(key))

    def _do(self, call: Callable[[], Any], finish: Callable[[], Any] | None = None) -> Any:
        draw = self._chance.random()
        if draw < self.hang_share:
            if self._chance.random() < 0.5:
                raise Hang(lambda: self._finish(finish or call))
            result = call()
            raise Hang(lambda: result)
        if draw < self.hang_share + self.fault_share:
            fault = self._chance.choice(("slow", "twice", "system"))
            if fault == "slow":
                self._clock.now += self._chance.choice((0.5, 7.0, 90.0))
            if fault == "twice":
                result = call()
                with suppress(TierFull):  # an answer that nobody waits for any more
                    self._finish(call)
                return result
            if fault == "system":
                number = self._chance.choice((errno.ENOSPC, errno.EIO, errno.EACCES))
                raise OSError(number, os.strerror(number))
        return call()

    def _finish(self, call: Callable[[], Any]) -> Any:
        share, self._below.fault_share = self._below.fault_share, 0.0
        try:
            return call()
        finally:
            self._below.fault_share = share


class FaultyTier(Tier):
    """Keeps copies in memory, within a limit, and has all faults that a disk or a network has."""

    def __init__(self, chance: random.Random, limit_bytes: int, fault_share: float = 0.0) -> None:
        self._chance = chance
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
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
    def tier(self) -> Tier:
        """The tier itself: its faults are its own."""
        return self

    def check(self) -> None:
        """The limit is kept."""
        kept = sum(sum(map(len, chunks)) for _, chunks in self.kept.values())
        assert kept == self.used_bytes <= self.limit_bytes

    def left(self) -> list[str]:
        """The keys that it has."""
        return [*self.kept]

    def harm(self) -> None:
        """Nothing more: what it keeps is harmed as it is put."""

    def close(self) -> None:
        """Nothing is held."""

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
        self._drop(key)
        if self.keeps_used and self.used_bytes + size_bytes > self.limit_bytes:
            raise TierFull("simulated: full of what is used")
        while self.used_bytes + size_bytes > self.limit_bytes:
            self._drop(next(iter(self.kept)))
        if fault != "lost at once":
            self.kept[key] = (seal, copy)
            self.used_bytes += size_bytes
        if fault == "away after" or self.is_silent:
            raise TierRetry("simulated: no answer, though it was written")

    def _drop(self, key: str) -> None:
        _, chunks = self.kept.pop(key, (None, []))
        self.used_bytes -= sum(map(len, chunks))

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
        fault = self._fault("away", "lost", "half read", "flipped")
        if fault == "away" or key in self.bad_keys:
            raise TierRetry("simulated: away")
        if fault == "lost" or key not in self.kept:
            self._drop(key)
            raise SnapshotMiss("simulated: lost")
        seal, chunks = self.kept[key]
        rooms = make_room(seal)
        for room, chunk in zip(rooms, chunks, strict=True):
            size_bytes = len(chunk) // 2 if fault == "half read" else len(chunk)
            room[:size_bytes] = chunk[:size_bytes]
        if fault == "half read":
            raise TierRetry("simulated: the line broke")
        if fault == "flipped" and rooms:
            rooms[0][0] ^= 1
        try:
            if [len(chunk) for chunk in chunks] != list(seal.used_bytes):
                raise SnapshotDamaged("simulated: torn")
            seal.check_bytes(rooms)
        except SnapshotDamaged:
            self._drop(key)
            raise
        return seal

    def remove(self, key: str) -> None:
        if self._fault("away") is not None:
            raise TierRetry("simulated: away")
        self._drop(key)

    def _fault(self, *names: str) -> str | None:
        if self.is_away:
            raise TierRetry("simulated: away")
        return self._chance.choice(names) if self._chance.random() < self.fault_share else None


class SilentTier(FaultyTier):
    """A tier that says only after `gate` is set what it has, and gives it back only then."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1 << 20)
        self.asked: list[list[str]] = []
        """The keys of each call."""
        self.read: list[str] = []
        self.gate = threading.Event()

    def contains(self, key: str) -> bool:
        return self.contains_each([key])[0]

    def contains_each(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append([*keys])
        self.gate.wait()
        if self.is_away:
            raise TierRetry("simulated: away")
        return [key in self.kept for key in keys]

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        self.read.append(key)
        self.gate.wait()
        return super().get(key, make_room)
