"""Searches ask for many names at once, and nobody waits for them longer than the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import SnapshotMiss
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from kvtide.tier import Spill, retries
from kvtide.tier import search as search_module
from tier.faulty_tiers import Clock, SilentTier

DEADLINE_S = 60.0


class Bench:
    """A spill over a tier that hangs and one that is well; the time is the test's."""

    def __init__(self, device: CPUDevice) -> None:
        geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        pool = Pool.create(geometry, device, page_count=4)
        self.clock = Clock()
        self.arena = HostArena(device, limit_bytes=1 << 14, block_bytes=512)
        self.silent, self.well = SilentTier(), SilentTier()
        self.well.gate.set()
        tiers = [self.silent, self.well]
        self.spill = Spill(
            self.arena,
            tiers,
            name_of=str,
            deadline_s=DEADLINE_S,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
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
    assert [["shared/a"]] == bench.silent.asked
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
    assert ([["a", "b"]], 1) == (bench.silent.asked, bench.late_count())
    search = bench.spill.seek(["b"])
    search.job.wait()
    assert [["a", "b"], ["b"]] == bench.silent.asked


def test_what_was_found_before_a_tier_hung_is_taken(bench: Bench) -> None:
    """The blocks before the one at which nobody answers are of use."""
    bench.keep("shared/a")

    def ends_at(_: int) -> Iterator[str]:
        bench.silent.gate.clear()
        yield "c"

    bench.silent.gate.set()
    search = bench.spill.seek(["shared/a", "shared/b"], ends_at)
    wait_until(lambda: ["c"] in bench.silent.asked)
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


def test_many_ends_are_asked_for_at_once(bench: Bench) -> None:
    """A call over a network takes as long as a computed token; the first end that is there wins."""
    bench.silent.gate.set()
    bench.keep("3")
    bench.keep("5")
    search = bench.spill.seek([], lambda _: map(str, range(search_module._AT_ONCE + 3)))
    search.job.wait()
    assert [[str(number) for number in range(search_module._AT_ONCE)]] == bench.silent.asked
    (found,) = bench.spill.take(search)
    assert "3" == found.seal.key
    bench.spill.remove(found)


def test_ends_are_asked_for_up_to_the_last(bench: Bench) -> None:
    """Even if they are too many for one call."""
    bench.silent.gate.set()
    count = 2 * search_module._AT_ONCE + 1
    bench.keep(str(count - 1))
    search = bench.spill.seek([], lambda _: map(str, range(count)))
    search.job.wait()
    (found,) = bench.spill.take(search)
    assert (str(count - 1), 3) == (found.seal.key, len(bench.silent.asked))
    bench.spill.remove(found)


def test_a_tier_is_asked_for_what_those_before_it_lack(bench: Bench) -> None:
    """Names up to the first that no tier has; and a tier is asked once for many of them."""
    bench.silent.gate.set()
    names = [f"shared/{number}" for number in range(5)]
    for place in (0, 1, 3, 4):
        bench.keep(names[place])
    bench.silent.kept = {name: bench.well.kept.pop(name) for name in (names[0], names[4])}
    search = bench.spill.seek(names)
    search.job.wait()
    assert ([names], [names[1:]]) == (bench.silent.asked, bench.well.asked)
    found = bench.spill.take(search)
    assert names[:2] == [snapshot.seal.key for snapshot in found]
    for snapshot in found:
        bench.spill.remove(snapshot)


def test_a_tier_that_cannot_answer_is_not_asked_for_each_name(bench: Bench) -> None:
    """It is tried again as often as any call. The others have what they have."""
    bench.silent.gate.set()
    bench.silent.is_away = True
    names = [f"shared/{number}" for number in range(3)]
    for name in names:
        bench.keep(name)
    search = bench.spill.seek(names)
    search.job.wait()
    assert [names] * (1 + len(retries.WAITS_S)) == bench.silent.asked
    found = bench.spill.take(search)
    assert names == [snapshot.seal.key for snapshot in found]
    for snapshot in found:
        bench.spill.remove(snapshot)


def test_reads_that_hang_keep_no_search(bench: Bench) -> None:
    """Nobody waits for what is read ahead. Still its tier isn't asked any more, and others are."""
    thread_count = bench.thread_count
    names = [f"shared/{number}" for number in range(thread_count)]
    for name in (*names, "shared/last"):
        bench.keep(name)
    bench.silent.gate.set()
    bench.silent.kept = {name: bench.well.kept.pop(name) for name in names}
    search = bench.spill.seek(names)
    search.job.wait()
    found = bench.spill.take(search)
    bench.silent.gate.clear()
    bench.silent.read.clear()
    assert not any(bench.spill.read_ahead(snapshot) for snapshot in found)
    wait_until(lambda: len(bench.silent.read) == thread_count)
    bench.clock.now = DEADLINE_S
    assert not any(bench.spill.read_ahead(snapshot) for snapshot in found)
    bench.clock.now += 1
    search = bench.spill.seek(["shared/last"])
    wait_until(search.has_ended)
    found += bench.spill.take(search)
    assert [*names, "shared/last"] == [snapshot.seal.key for snapshot in found]
    assert (thread_count, 2 * thread_count) == (bench.late_count(), bench.thread_count)
    assert not bench.silent.gate.is_set()
    assert all(bench.spill.read_ahead(snapshot) for snapshot in found[:-1])
    with pytest.raises(SnapshotMiss):
        bench.spill.require(found[0])
    for snapshot in found:
        bench.spill.remove(snapshot)
