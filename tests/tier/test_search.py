"""Searches of tiers that hang: nobody waits for them longer than the deadline."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from kvtide.tier import Spill
from tier.faulty_tiers import Clock, FaultyTier, SilentTier

DEADLINE_S = 60.0


class Bench:
    """A spill over a tier that hangs and one that is well; the time is the test's."""

    def __init__(self, device: CPUDevice) -> None:
        geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        pool = Pool.create(geometry, device, page_count=4)
        self.clock = Clock()
        self.arena = HostArena(device, limit_bytes=1 << 14, block_bytes=512)
        self.silent, self.well = SilentTier(), FaultyTier(random.Random(1), 1 << 20)
        tiers = [self.silent, self.well]
        self.spill = Spill(self.arena, tiers, name_of=str, deadline_s=DEADLINE_S, clock=self.clock)
        self.tide = Tide(pool, self.arena)

    def keep(self, key: str) -> None:
        """Has the tier that is well keep a snapshot."""
        snapshot = self.tide.offload(range(8), key=key)
        self.well.save(key, snapshot)
        self.tide.discard(snapshot)

    def late_count(self) -> int:
        """How many answers of the tier that hangs were too late."""
        return next(iter(self.spill.stats.tiers.values())).misses["late"]

    @property
    def thread_count(self) -> int:
        """How many threads ask tiers."""
        return len(self.spill._workers._threads._threads)  # type: ignore[attr-defined]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench whose tier hangs, if the test fails, for a minute at most."""
    with closing(CPUDevice(lanes=1)) as device:
        bench = Bench(device)
        in_case_of_failure = threading.Timer(60, bench.silent.gate.set)
        in_case_of_failure.start()
        yield bench
        in_case_of_failure.cancel()
        bench.silent.gate.set()
        bench.spill.close()
        assert 0 == bench.arena.used_bytes


def wait_until(is_so: Callable[[], object]) -> None:
    """Waits for other threads."""
    while not is_so():
        time.sleep(0.001)


def test_a_search_that_hangs_is_given_up(bench: Bench) -> None:
    """Its tier isn't asked before it has answered; others are, by as many threads as before."""
    bench.keep("shared/a")
    hung = bench.spill.seek(["shared/a"])
    wait_until(lambda: bench.silent.asked)
    bench.clock.now = DEADLINE_S
    assert not hung.has_ended()
    before = bench.thread_count
    bench.clock.now += 1
    assert hung.has_ended()
    assert [] == bench.spill.take(hung)
    assert 1 == bench.late_count()
    for _ in range(6):
        search = bench.spill.seek(["shared/a"])
        wait_until(search.has_ended)
        (found,) = bench.spill.take(search)
        bench.spill.remove(found)
    assert ["shared/a"] == bench.silent.asked
    assert before + 1 == bench.thread_count
    assert not bench.silent.gate.is_set()


def test_a_search_that_was_given_up_asks_nobody_any_more(bench: Bench) -> None:
    """Its thread is free as soon as the call under way ends; and it is counted once."""
    hung = bench.spill.seek(["a", "b"], lambda _: ["c"])
    wait_until(lambda: bench.silent.asked)
    bench.clock.now = DEADLINE_S + 1
    assert hung.has_ended()
    assert hung.has_ended()
    bench.silent.gate.set()
    hung.job.wait()
    assert (["a"], 1) == (bench.silent.asked, bench.late_count())
    search = bench.spill.seek(["b"])
    search.job.wait()
    assert ["a", "b"] == bench.silent.asked


def test_what_was_found_before_a_tier_hung_is_taken(bench: Bench) -> None:
    """The blocks before the one at which nobody answers are of use."""
    bench.keep("shared/a")

    def ends_at(_: int) -> Iterator[str]:
        bench.silent.gate.clear()
        yield "c"

    bench.silent.gate.set()
    search = bench.spill.seek(["shared/a", "shared/b"], ends_at)
    wait_until(lambda: "c" in bench.silent.asked)
    bench.clock.now = DEADLINE_S + 1
    assert search.has_ended()
    (found,) = bench.spill.take(search)
    assert "shared/a" == found.seal.key
    bench.spill.remove(found)


def test_a_search_that_no_thread_has_begun_blames_no_tier(bench: Bench) -> None:
    """All threads are busy: that says nothing of the tiers."""
    workers, gate = bench.spill._workers, threading.Event()
    busy = [workers.start(gate.wait) for _ in range(bench.thread_count)]
    search = bench.spill.seek(["a"])
    bench.clock.now = DEADLINE_S + 1
    assert search.has_ended()
    gate.set()
    for job in (*busy, search.job):
        job.wait()
    assert ([], 0) == (bench.silent.asked, bench.late_count())
