"""MooncakeTier while parts of its store die, hang and come back: the same bytes, or an error."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from cluster import Cluster, fill, free_port

from kvtide.errors import SnapshotDamaged, SnapshotMiss, TierFull, TierRetry, UsageError
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import MooncakeTier

THREADS = 4
LONGEST_S = 120
"""A run that hangs ends here; what is well takes seconds."""
NAMES = {SnapshotMiss: "miss", SnapshotDamaged: "damaged", TierFull: "full", TierRetry: "retry"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master and two nodes for one test."""
    with closing(Cluster(tmp_path)) as cluster:
        yield cluster


@pytest.fixture
def tier(cluster: Cluster) -> Iterator[MooncakeTier]:
    """A tier over that store."""
    with closing(MooncakeTier(cluster.address)) as tier:
        yield tier


@pytest.fixture
def snapshots(tide: Tide) -> Iterator[list[Snapshot]]:
    """Eight snapshots of 1 MiB; all bytes of each are its number."""
    snapshots = []
    for value in range(8):
        fill(tide, value)
        snapshots.append(tide.offload(range(256)))
    yield snapshots
    for snapshot in snapshots:
        tide.discard(snapshot)


def read(tier: MooncakeTier, key: str, into: bytes = b"\xff") -> tuple[list[bytearray], Seal]:
    """What a tier has for a key, in memory whose bytes were `into`."""
    rooms: list[bytearray] = []

    def make_room(seal: Seal) -> list[memoryview]:
        rooms[:] = [bytearray(into * size_bytes) for size_bytes in seal.used_bytes]
        return [memoryview(room) for room in rooms]

    return rooms, tier.get(key, make_room)


class Load:
    """Threads that put, get and remove, each with keys of its own, and count what comes of it.

    Bytes that weren't put under their key end a thread with an AssertionError.
    """

    def __init__(self, tier: MooncakeTier, snapshots: list[Snapshot]) -> None:
        self.tier = tier
        self.snapshots = snapshots
        self.outcomes = Counter[str]()
        self.is_ending = False
        self._threads = ThreadPoolExecutor(THREADS)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Load:
        self._running = [self._threads.submit(self._run, number) for number in range(THREADS)]
        return self

    def __exit__(self, *_: object) -> None:
        self.is_ending = True
        for running in self._running:
            running.result()
        self._threads.shutdown()

    def wait_for(self, name: str, count: int) -> None:
        """Waits until an outcome has happened so many times more."""
        wanted, until = self.outcomes[name] + count, time.monotonic() + LONGEST_S
        while self.outcomes[name] < wanted:
            assert time.monotonic() < until, (name, self.outcomes)
            for running in self._running:
                assert not running.done() or running.result()
            time.sleep(0.01)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        possible: dict[str, set[int]] = {f"{number}/{key}": set() for key in range(6)}
        while not self.is_ending:
            key = chance.choice(list(possible))
            try:
                self._step(key, possible[key], chance)
            except tuple(NAMES) as error:
                self.outcomes[NAMES.get(type(error), "miss")] += 1
                if isinstance(error, TierRetry):
                    time.sleep(0.02)

    def _step(self, key: str, possible: set[int], chance: random.Random) -> None:
        """Does something; `possible` are the snapshots that the key may have."""
        act = chance.random()
        if act < 0.4:
            value = chance.randrange(len(self.snapshots))
            possible.add(value)  # also after an error, which may have come late
            self.tier.save(key, self.snapshots[value])
            possible.intersection_update([value])
            self.outcomes["written"] += 1
        elif act < 0.95:
            rooms, _ = read(self.tier, key)
            (value,) = {room[0] for room in rooms}
            assert value in possible
            assert all(not room.strip(bytes([value])) for room in rooms)
            self.outcomes["hit"] += 1
        else:
            self.tier.remove(key)
            possible.clear()


def test_node_dies_under_load_and_comes_back(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """What it had is a miss; the other node goes on, and later both do."""
    with Load(tier, snapshots) as load:
        load.wait_for("hit", 50)
        cluster.kill("node0")
        load.wait_for("miss", 10)
        cluster.wait_for_nodes(1)
        load.wait_for("hit", 20)
        cluster.start_node(0)
        cluster.wait_for_nodes(2)
        load.wait_for("hit", 50)
    assert 0 == load.outcomes["damaged"], load.outcomes


def test_master_dies_under_load_and_comes_back(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """Nobody knows any more what the nodes have, so all of it is a miss; then the tier goes on."""
    with Load(tier, snapshots) as load:
        load.wait_for("hit", 50)
        cluster.kill("master")
        load.wait_for("retry", THREADS)
        cluster.start_master()
        cluster.wait_for_nodes(2)
        load.wait_for("written", 20)
        load.wait_for("hit", 50)


def test_all_die_under_load_and_come_back(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """A whole store that starts anew is used again, by the tier that used the old one."""
    with Load(tier, snapshots) as load:
        load.wait_for("hit", 50)
        for name in ("node0", "master", "node1"):
            cluster.kill(name)
        load.wait_for("retry", THREADS)
        cluster.start_master()
        for number in range(2):
            cluster.start_node(number)
        cluster.wait_for_nodes(2)
        load.wait_for("hit", 50)


def test_a_master_that_hangs_costs_a_while(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """It is there and doesn't answer: each call ends with an error, and later works again."""
    with Load(tier, snapshots) as load:
        load.wait_for("hit", 50)
        cluster.stop("master")
        load.wait_for("retry", 1)
        cluster.go_on("master")
        load.wait_for("hit", 50)


def test_a_node_that_hangs_costs_a_while(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """Calls that wait for it end; the master gives it up, and takes it back when it goes on."""
    with Load(tier, snapshots) as load:
        load.wait_for("hit", 50)
        cluster.stop("node0")
        cluster.wait_for_nodes(1)
        load.wait_for("hit", 20)
        cluster.go_on("node0")
        cluster.wait_for_nodes(2)
        load.wait_for("hit", 50)
    assert 0 == load.outcomes["damaged"], load.outcomes


def test_memory_of_a_read_that_failed_is_never_written_later(
    cluster: Cluster, tier: MooncakeTier, snapshots: list[Snapshot]
) -> None:
    """A node that hung sends its bytes late; by then they have nowhere to go."""
    tier.save("a", snapshots[5])
    memory = memoryview(bytearray(sum(snapshots[5].seal.used_bytes)))

    def make_room(seal: Seal) -> list[memoryview]:
        size_bytes = seal.chunk_bytes
        for name in ("node0", "node1"):
            cluster.stop(name)
        return [memory[first : first + size_bytes] for first in range(0, len(memory), size_bytes)]

    with pytest.raises((SnapshotMiss, TierRetry)):
        tier.get("a", make_room)
    memory[:] = b"\x77" * len(memory)
    for name in ("node0", "node1"):
        cluster.go_on(name)
    time.sleep(1)
    assert not bytes(memory).strip(b"\x77")


def test_store_without_nodes_is_full(tmp_path: Path, snapshots: list[Snapshot]) -> None:
    """A master alone answers, and has room for nothing."""
    with (
        closing(Cluster(tmp_path, node_count=0)) as cluster,
        closing(MooncakeTier(cluster.address)) as tier,
    ):
        with pytest.raises(TierFull):
            tier.save("a", snapshots[0])
        with pytest.raises(SnapshotMiss):
            read(tier, "a")


def test_store_that_is_not_there_is_refused_at_once() -> None:
    """The error names the master's address."""
    port = free_port()
    with pytest.raises(UsageError, match=rf"no master at 127\.0\.0\.1:{port}"):
        MooncakeTier(f"127.0.0.1:{port}")
