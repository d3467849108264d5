"""What leaves a full arena for the tier below; what moves and what a caller holds never does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtide.arena import HostArena
from kvtide.errors import ArenaFull, SnapshotMiss
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import Spill
from support.lazy_device import LazyDevice, LazyJob, LazyQueue
from support.pools import fill, image_of, make_pool, poison, same_image, small_geometry, with_rows
from tier.faulty_tiers import FaultyTier

BLOCK_BYTES = 4 * 36


class LazyWorkers:
    """Workers that do nothing before somebody waits for them, and not even then while they hang."""

    def __init__(self) -> None:
        self._queue = LazyQueue()
        self.is_hung = False

    def start(self, work: Callable[[], Any]) -> LazyJob[Any]:
        """See Workers."""
        return self._queue.submit(work)

    def settle(self, job: Any, timeout_s: float) -> bool:
        """See Workers."""
        while not self.is_hung and not job.done():
            self._queue.run_next()
        return bool(job.done())

    def close(self, patience_s: float = 0.0) -> None:
        """See Workers."""
        self._queue.close()


class AskedJob:
    """Work that is done when somebody has asked so often whether it is done, or waits for it."""

    def __init__(self, work: Callable[[], Any], asks: int) -> None:
        self._work = work
        self._asks_left = asks
        self._results: list[Any] = []

    def done(self) -> bool:
        """See Job."""
        self._asks_left -= 1
        if self._asks_left == 0:
            self.run()
        return bool(self._results)

    def run(self) -> None:
        if not self._results:
            self._results.append(self._work())

    def wait(self) -> Any:
        """See Job."""
        return self._results[0]


class AskedWorkers:
    """Workers whose next work ends at a certain question, so that a test can try every moment."""

    def __init__(self) -> None:
        self.asks = 1
        self._jobs: list[AskedJob] = []

    def start(self, work: Callable[[], Any]) -> AskedJob:
        """See Workers."""
        self._jobs.append(AskedJob(work, self.asks))
        return self._jobs[-1]

    def settle(self, job: Any, timeout_s: float) -> bool:
        """See Workers."""
        job.run()
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """See Workers."""
        for job in self._jobs:
            job.run()


class World:
    """A tide over an arena of four blocks, each for a request of four tokens, and a tier below."""

    def __init__(self, workers: LazyWorkers | AskedWorkers | None = None) -> None:
        device = LazyDevice()
        case = make_pool("created", small_geometry(), device, 8)
        fill(case, 1)
        workers = workers or LazyWorkers()
        self.arena = HostArena(device, limit_bytes=4 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        tier = FaultyTier(random.Random(1), 1 << 20)
        self.spill = Spill(self.arena, [tier], workers=workers, high_mark=1.0)
        self.tide = Tide(case.pool, self.arena, spill=self.spill)

    def save(self, page: int) -> Snapshot:
        """A snapshot of the four tokens of a page."""
        return self.tide.offload(slots_of(page))

    def here(self, snapshots: Sequence[Snapshot]) -> list[int]:
        """The numbers of the snapshots that are in the arena."""
        return [number for number, snapshot in enumerate(snapshots) if snapshot.size_bytes]

    def close(self, *snapshots: Snapshot) -> None:
        """Nothing is held at the end."""
        for snapshot in snapshots:
            self.tide.discard(snapshot)
        self.spill.close()
        assert 0 == self.arena.used_bytes


def slots_of(page: int) -> range:
    """The four slots of a page."""
    return range(4 * page, 4 * page + 4)


def test_snapshot_that_moves_stays_though_it_was_used_longest_ago() -> None:
    """The next one in the order of use leaves instead, and the move gives the right bytes."""
    world = World()
    saved = [world.save(page) for page in range(4)]
    before = image_of(world.tide.pool)
    restoring = world.tide.start_restore(saved[0], slots_of(6))
    for snapshot in saved[1:]:
        world.tide.read_ahead(snapshot)  # now the one that moves was used longest ago
    world.spill.make_room(1)
    assert [0, 2, 3] == world.here(saved)
    assert not restoring.done()
    restoring.wait()
    expected = with_rows(before, slots_of(6), before, slots_of(0))
    assert same_image(expected, image_of(world.tide.pool))
    world.spill.make_room(2)
    assert [2, 3] == world.here(saved), "once the move has ended it leaves as any other"
    world.close(*saved)


def test_arena_full_of_moves_is_full() -> None:
    """A request finds no room, though the tier has some; what moves is as it was."""
    world = World()
    saved = [world.save(page) for page in range(3)]
    offloading = world.tide.start_offload(slots_of(3))
    restoring = [world.tide.start_restore(saved[i], slots_of(5 + i)) for i in range(3)]
    before = image_of(world.tide.pool)
    with pytest.raises(ArenaFull):
        world.save(4)
    assert [0, 1, 2] == world.here(saved)
    assert 4 * BLOCK_BYTES == world.arena.used_bytes
    for ticket in restoring:
        ticket.wait()
    expected = with_rows(before, range(20, 32), before, range(12))
    assert same_image(expected, image_of(world.tide.pool))
    world.close(*saved, offloading.wait())


@pytest.mark.parametrize("is_discarded", [False, True])
def test_memory_that_a_tier_still_reads_is_nobody_elses(is_discarded: bool) -> None:
    """A write that hangs keeps its memory after the deadline, and after the caller's discard."""
    workers = LazyWorkers()
    world = World(workers)
    saved = [world.save(page) for page in range(4)]
    workers.is_hung = True
    with pytest.raises(ArenaFull):
        world.save(4)
    if is_discarded:
        world.tide.discard(saved[0])
    assert 4 * BLOCK_BYTES == world.arena.used_bytes
    workers.is_hung = False
    workers.close()
    more = world.save(4)
    assert 3 == len(world.here(saved))
    assert 4 * BLOCK_BYTES == world.arena.used_bytes
    world.close(*saved, more)


def test_lease_of_a_caller_is_never_taken() -> None:
    """Only snapshots leave. When none is left the arena is full, and the lease's bytes stay."""
    world = World()
    lease = world.arena.lease(2)
    for block in lease.blocks:
        block.tensor(0, BLOCK_BYTES).fill_(7)
    saved = [world.save(page) for page in range(5)]
    assert [3, 4] == world.here(saved)
    with pytest.raises(ArenaFull):
        world.tide.offload(range(12))
    assert [] == world.here(saved)
    assert all(bool((block.tensor(0, BLOCK_BYTES) == 7).all()) for block in lease.blocks)
    before = image_of(world.tide.pool)
    poison(world.tide.pool, range(20))
    for page, snapshot in enumerate(saved):
        world.tide.restore(snapshot, slots_of(page))
    assert same_image(before, image_of(world.tide.pool))
    lease.release()
    world.close(*saved)


def test_snapshot_below_says_where_it_is() -> None:
    """Its bytes aren't in host memory, but it isn't lost: the error says how to get at them."""
    world = World()
    snapshot = world.save(0)
    world.spill.make_room(4)
    for use in (lambda: snapshot.chunks, snapshot.verify):
        with pytest.raises(SnapshotMiss, match="of 4 tokens is in a tier below host memory; rest"):
            use()
    world.tide.discard(snapshot)
    with pytest.raises(SnapshotMiss, match="of 4 tokens was discarded already"):
        snapshot.verify()
    world.close()


@pytest.mark.parametrize("asks", range(1, 9))
def test_request_finds_room_whenever_a_read_ends(asks: int) -> None:
    """It needs three of four blocks, and the last one is kept for what is below.

    A read that is under way has that block. It may end between any two steps of the request.
    """
    workers = AskedWorkers()
    world = World(workers)
    saved = [world.save(page) for page in range(5)]
    world.spill.make_room(3)
    world.spill.make_room(3)
    assert len(world.here(saved)) == 1
    workers.asks = asks
    world.tide.read_ahead(saved[0])
    world.close(*saved, world.tide.offload(range(12)))
