"""Snapshots that don't fit into an arena go to tiers, and come back whole or not at all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import DiskTier, Spill, retries
from kvtide.tier import spill as spill_module
from tier.faulty_tiers import FaultyTier, SilentTier, SimulatedJob
from tier.simulation import BLOCK_BYTES, KINDS, SLOT_COUNT, TOKEN_BYTES, World, walk

STEPS = {"memory": 10_000, "disk": 2_000, "mooncake": 2_000, "disk over mooncake": 2_000}


def damage(chunks: list[bytes]) -> None:
    """Flips a bit of what a tier has."""
    chunks[0] = bytes([chunks[0][0] ^ 1]) + chunks[0][1:]


@pytest.fixture(scope="module")
def device() -> Iterator[CPUDevice]:
    """A device whose jobs run in the calling thread."""
    with closing(CPUDevice(lanes=1)) as device:
        yield device


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(device: CPUDevice) -> Iterator[MakeWorld]:
    """Makes worlds. At the end of the test nothing may be held."""
    worlds: list[World] = []

    def make(seed: int = 0, **more: object) -> World:
        worlds.append(World(seed, device, **more))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.workers.close()
        world.spill.close()
        assert 0 == world.arena.used_bytes


def test_ten_times_the_arena_comes_back(make_world: MakeWorld) -> None:
    """Snapshots of ten times the arena's limit are kept, and each restores its bytes."""
    world = make_world()
    snapshots = [world.save(value) for value in range(40)]
    assert world.arena.peak_bytes <= world.arena.limit_bytes
    for value in world.chance.sample(range(40), 40):
        world.load(snapshots[value], value)
        world.load(snapshots[value], value)
    for snapshot in snapshots:
        world.tide.discard(snapshot)
    world.workers.close()
    assert [{}] == [tier.kept for tier in world.tiers]
    assert world.spill.stats.spills >= 36


def test_least_recently_used_goes_down(make_world: MakeWorld) -> None:
    """A snapshot that was restored, or is wanted soon, stays; the one used first goes."""
    world = make_world()
    first, second, third, fourth = (world.save(value) for value in range(4))
    world.load(first, 0)
    world.tide.read_ahead(second)
    fifth = world.save(4)
    assert [True, True, False, True, True] == [
        bool(s.size_bytes) for s in (first, second, third, fourth, fifth)
    ]
    for snapshot in (first, second, third, fourth, fifth):
        world.tide.discard(snapshot)


def test_writes_begin_before_the_arena_is_full(make_world: MakeWorld) -> None:
    """Past the high mark the oldest is written, so the next offload waits for nothing."""
    world = make_world()
    snapshots = [world.save(value) for value in range(4)]
    while world.workers.step():
        pass
    waited = world.spill.stats.waited_seconds
    snapshots.append(world.save(4))
    assert 1 <= world.spill.stats.spills
    assert waited == world.spill.stats.waited_seconds
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_what_is_read_ahead_is_there_in_time(make_world: MakeWorld) -> None:
    """A snapshot that was asked for early is restored without a wait."""
    world = make_world()
    snapshots = [world.save(value) for value in range(8)]
    while world.workers.step():
        pass
    world.spill.settle()
    assert 0 == snapshots[0].size_bytes
    world.tide.read_ahead(snapshots[0])
    while world.workers.step():
        pass
    (counts,) = world.spill.stats.tiers.values()
    world.load(snapshots[0], 0)
    assert (1, 1) == (counts.hits, world.spill.stats.reads_in_time)
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_read_that_was_asked_for_late_counts_as_late(make_world: MakeWorld) -> None:
    """A read ahead that hasn't ended when the snapshot is wanted is waited for, and counted."""
    world = make_world()
    snapshots = [world.save(value) for value in range(8)]
    while world.workers.step():
        pass
    world.tide.read_ahead(snapshots[0])
    world.load(snapshots[0], 0)
    world.load(snapshots[1], 1)  # nobody asked for this one
    assert (0, 1) == (world.spill.stats.reads_in_time, world.spill.stats.reads_late)
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_counts_of_each_tier(make_world: MakeWorld) -> None:
    """What went down and up, and why not, is counted for the tier that did it."""
    world = make_world(limits=(100, 1 << 16))
    snapshots = [world.save(value) for value in range(20)]
    first, second = world.tiers
    kept = list(second.kept.values())
    damage(kept[0][1])
    lost = next(iter(list(second.kept)[1:]))
    del second.kept[lost]
    errors = 0
    for value, snapshot in enumerate(snapshots):
        try:
            world.load(snapshot, value)
        except (SnapshotDamaged, SnapshotMiss):
            errors += 1
        world.tide.discard(snapshot)
    refusing, taking = world.spill.stats.tiers.values()
    assert ["FaultyTier", "FaultyTier_1"] == list(world.spill.stats.tiers)
    assert (0, 0, 0) == (refusing.writes, refusing.hits, refusing.down_bytes)
    assert {"full": taking.writes, "away": 0, "late": 0} == refusing.refused_writes
    assert {"full": 0, "away": 0, "late": 0} == taking.refused_writes
    assert 16 <= taking.writes == world.spill.stats.spills
    assert 16 * TOKEN_BYTES * taking.writes == taking.down_bytes
    assert 16 * TOKEN_BYTES * taking.hits == taking.up_bytes > 0
    assert (1, {"gone": 1, "away": 0, "late": 0}) == (taking.damaged, taking.misses)
    assert (2, 0) == (errors, first.used_bytes)


def test_tier_that_is_away_counts_as_away(make_world: MakeWorld) -> None:
    """Reads and writes that a tier can't do now aren't counted as lost or full."""
    world = make_world()
    snapshots = [world.save(value) for value in range(8)]
    for _ in range(2):
        world.tide.discard(snapshots.pop())
    world.tiers[0].is_away = True
    with pytest.raises(SnapshotMiss, match="simulated: away"):
        world.load(snapshots[0], 0)
    snapshots += [world.save(6), world.save(7)]
    with pytest.raises(ArenaFull):
        world.save(8)
    (counts,) = world.spill.stats.tiers.values()
    assert {"gone": 0, "away": 1, "late": 0} == counts.misses
    assert (0, 0) == (counts.refused_writes["full"], counts.refused_writes["late"])
    assert 1 <= counts.refused_writes["away"]
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_without_room_below_the_arena_is_full(make_world: MakeWorld) -> None:
    """The error is the arena's, for the request that has no room; the others stay whole."""
    world = make_world(limits=(100,))
    snapshots = [world.save(value) for value in range(4)]
    with pytest.raises(ArenaFull):
        world.save(4)
    for value, snapshot in enumerate(snapshots):
        world.load(snapshot, value)
        world.tide.discard(snapshot)


@pytest.mark.parametrize("seed", range(20))
def test_who_finds_all_full_is_refused_and_all_others_come_back(
    make_world: MakeWorld, seed: int
) -> None:
    """In whatever order they come back, the arena has room for what they read."""
    world = make_world(seed, limits=(20 * BLOCK_BYTES + seed * 100,))
    world.tiers[0].keeps_used = True
    saved = []
    for value in range(30):
        count = world.chance.randrange(1, 33)  # of a block to half of the arena
        with suppress(ArenaFull):
            saved.append((world.save(value, count), value))
    assert 5 < len(saved) < 30
    world.chance.shuffle(saved)
    for snapshot, value in saved:
        world.load(snapshot, value)
        world.tide.discard(snapshot)


def test_second_tier_takes_what_the_first_refuses(make_world: MakeWorld) -> None:
    """Tiers are asked in order."""
    world = make_world(limits=(100, 1 << 16))
    snapshots = [world.save(value) for value in range(20)]
    for value, snapshot in enumerate(snapshots):
        world.load(snapshot, value)
        world.tide.discard(snapshot)
    assert {} == world.tiers[0].kept


def test_another_snapshot_under_the_key_is_a_miss_and_stays(make_world: MakeWorld) -> None:
    """Another process may have put its own there, which is whole, and no damage."""
    world = make_world()
    snapshots = [world.save(value) for value in range(8)]
    kept = world.tiers[0].kept
    first, *others = kept
    kept[first] = kept[others[0]]
    with pytest.raises(SnapshotMiss, match="has another snapshot under this key"):
        world.load(snapshots[0], 0)
    assert first in kept
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_hung_tier_costs_one_call_its_deadline(make_world: MakeWorld) -> None:
    """Later calls don't wait for it; the late answers are noted, and leak nothing."""
    world = make_world(hangs=1.0)
    snapshots = [world.save(value) for value in range(4)]
    for _ in range(3):
        with pytest.raises(ArenaFull):
            world.save(4)
        assert world.clock.now == 5.0
    (counts,) = world.spill.stats.tiers.values()
    assert {"full": 0, "away": 0, "late": 1} == counts.refused_writes
    assert world.spill.find("any") is None
    world.hang(0.0)
    world.workers.wake()
    while world.workers.step():
        pass
    snapshots.append(world.save(4))
    for value, snapshot in enumerate(snapshots):
        world.load(snapshot, value)
        world.tide.discard(snapshot)
    assert world.clock.now == 5.0


def test_reads_from_a_hung_tier_cost_one_deadline(make_world: MakeWorld) -> None:
    """The first caller waits, the others miss at once; the tier is asked again when it answers."""
    world = make_world()
    snapshots = [world.save(value) for value in range(8)]
    for _ in range(2):
        world.tide.discard(snapshots.pop())
    world.hang(1.0)
    for value in (0, 1):
        with pytest.raises(SnapshotMiss, match="no tier gave a snapshot of 16 tokens back"):
            world.load(snapshots[value], value)
    (counts,) = world.spill.stats.tiers.values()
    assert world.clock.now == 5.0
    assert 2 == counts.misses["late"] + counts.misses["away"]
    world.hang(0.0)
    world.workers.wake()
    while world.workers.step():
        pass
    for value in (2, 3, 4, 5):
        world.load(snapshots[value], value)
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_other_tier_is_used_while_one_hangs(make_world: MakeWorld) -> None:
    """What the hung one doesn't take goes to the next."""
    world = make_world(limits=(1 << 16, 1 << 16))
    first = world.save(0)
    world.spill._tiers[0].note_late(hung := SimulatedJob(lambda: None))
    snapshots = [first, *(world.save(value) for value in range(1, 12))]
    assert {} == world.tiers[0].kept
    for value, snapshot in enumerate(snapshots):
        world.load(snapshot, value)
        world.tide.discard(snapshot)
    hung.run()


def test_nothing_is_left_of_a_write_that_seemed_to_fail(make_world: MakeWorld) -> None:
    """A tier that wrote without an answer is told to remove it, like the tier that took it."""
    world = make_world(limits=(1 << 16, 1 << 16))
    first, second = world.tiers
    first.is_silent = True
    snapshots = [world.save(value) for value in range(6)]
    while world.workers.step():
        pass
    world.spill.settle()
    assert 2 == len(first.kept.keys() & second.kept.keys())  # then the first one rests
    first.is_silent = False
    world.clock.now += 100
    for snapshot in snapshots:
        world.tide.discard(snapshot)
    world.spill.close()
    assert ({}, {}) == (first.kept, second.kept)


def test_removal_that_comes_late_spares_the_next_snapshot(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was resumed and is saved again has the same key: the order is no matter."""
    world = make_world()
    monkeypatch.setattr(world.spill, "_name_of", lambda key: "the same")
    old = world.save(0)
    world.spill.make_room(8)
    world.load(old, 0)
    world.tide.discard(old)
    (removal,) = world.workers.jobs
    world.workers.jobs.clear()
    new = world.save(1)
    world.spill.make_room(8)
    removal.run()
    world.load(new, 1)
    world.tide.discard(new)
    world.spill.close()
    assert [] == world.below[0].left()


def test_snapshot_of_a_key_that_still_moves_waits_for_it(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was discarded while it was written, and is saved again, has its own bytes."""
    world = make_world()
    monkeypatch.setattr(world.spill, "_name_of", lambda key: "the same")
    monkeypatch.setattr(world.spill, "_high_blocks", 0)
    world.hang(1.0)
    old = world.save(0)
    world.workers.step()
    world.tide.discard(old)
    new = world.save(1)
    (tier,) = world.tiers
    assert 1 == len(world.workers.jobs)
    world.calm()
    for _ in range(3):
        world.workers.close()
        world.spill.make_room(7)
    assert ["the same"] == list(tier.kept)
    assert new.seal == tier.kept["the same"][0]
    world.load(new, 1)
    world.tide.discard(new)
    world.spill.close()
    assert {} == tier.kept


def test_end_says_what_hangs(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that goes on when all is closed is named."""
    world = make_world(hangs=1.0)
    snapshots = [world.save(value) for value in range(4)]
    warnings: list[str] = []
    monkeypatch.setattr(
        spill_module.logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    with monkeypatch.context() as patch:
        patch.setattr(world.workers, "close", lambda patience_s: None)
        world.spill.close()
    assert [
        "kvtide ends without a move of 1024 bytes, which hangs in the tier 'FaultyTier'"
    ] == warnings
    world.hang(0.0)
    for snapshot in snapshots:
        world.tide.discard(snapshot)


def test_broken_tier_is_warned_of_once(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier with errors rests, costs one warning, and is used again when it answers."""
    world = make_world()
    snapshots = [world.save(value) for value in range(4)]
    world.tiers[0].is_away = True
    warnings: list[str] = []
    monkeypatch.setattr(
        retries.logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    for value in range(4, 8):
        with pytest.raises(ArenaFull):
            world.save(value)
    assert [
        "kvtide goes on without the tier 'FaultyTier' where that fails, until it answers: "
        "TierRetry: simulated: away"
    ] == warnings
    world.tiers[0].is_away = False
    world.clock.now += 100
    snapshots.append(world.save(8))
    assert ["kvtide uses the tier 'FaultyTier' again, which had errors"] == warnings[1:]
    for snapshot in snapshots:
        world.tide.discard(snapshot)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_under_all_faults_it_is_the_same_bytes_or_an_error(
    device: CPUDevice, tmp_path: Path, kind: str, seed: int
) -> None:
    """Random steps over faulty tiers: never other bytes, no limit exceeded, nothing leaked."""
    outcomes = walk(kind, seed, STEPS[kind], device, tmp_path)
    assert outcomes["hits"] > 20, outcomes
    assert outcomes["misses"] + outcomes["full"] > 20, outcomes


def test_disk_below_a_small_arena(device: CPUDevice, tmp_path: Path) -> None:
    """With real files and threads, many snapshots are kept in an arena for two of them."""
    geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
    pool = Pool.create(geometry, device, page_count=SLOT_COUNT // 4)
    arena = HostArena(device, limit_bytes=4 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    with (
        closing(DiskTier(tmp_path / "tier", limit_bytes=1 << 20)) as disk,
        closing(Spill(arena, [disk])) as spill,
    ):
        tide = Tide(pool, arena, spill=spill)
        snapshots = []
        for value in range(30):
            for buffer in pool.buffers:
                buffer.fill_(value)
            snapshots.append(tide.offload(range(16)))
        for value in random.Random(1).sample(range(30), 30):
            tide.restore(snapshots[value], range(40, 56))
            for buffer in pool.buffers:
                assert bool((buffer.view(2, SLOT_COUNT, -1)[:, 40:56] == value).all())
        for snapshot in snapshots:
            tide.discard(snapshot)
        assert 0 == arena.used_bytes
        assert 28 <= spill.stats.spills
    assert not list((tmp_path / "tier").glob("??/*.safetensors")), asdict(spill.stats)


@pytest.mark.parametrize("turn", range(4))
def test_what_is_discarded_while_it_moves_leaves_nothing(
    device: CPUDevice, tmp_path: Path, turn: int
) -> None:
    """The end waits for the moves, and then for the removal of what they wrote."""
    geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
    pool = Pool.create(geometry, device, page_count=SLOT_COUNT // 4)
    arena = HostArena(device, limit_bytes=8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    with closing(DiskTier(tmp_path / "tier", limit_bytes=1 << 20)) as disk:
        spill = Spill(arena, [disk], high_mark=0.0)
        tide = Tide(pool, arena, spill=spill)
        for snapshot in [tide.offload(range(16)) for _ in range(4 + turn)]:
            tide.discard(snapshot)
        spill.close()
        spill.close()
    assert 0 == arena.used_bytes
    assert not list((tmp_path / "tier").glob("??/*"))


class HungTier(FaultyTier):
    """Hangs in `put` until the gate opens."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1 << 20)
        self.gate = threading.Event()

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        self.gate.wait()
        super().put(key, seal, chunks)


def test_threads_that_hang_in_one_tier_do_not_keep_another(device: CPUDevice) -> None:
    """With real threads: all that is saved comes back, and the end waits for nothing that hangs."""
    geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
    pool = Pool.create(geometry, device, page_count=SLOT_COUNT // 4)
    arena = HostArena(device, limit_bytes=8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    hung, well = HungTier(), FaultyTier(random.Random(0), 1 << 20)
    spill = Spill(arena, [hung, well], deadline_s=0.1)
    tide = Tide(pool, arena, spill=spill)
    snapshots: dict[int, Snapshot] = {}
    refused = 0
    for value in range(20):
        for buffer in pool.buffers:
            buffer.fill_(value)
        try:
            snapshots[value] = tide.offload(range(16))
        except ArenaFull:
            refused += 1  # while what hangs holds its memory
    assert refused <= 3
    for value, snapshot in snapshots.items():
        tide.restore(snapshot, range(40, 56))
        for buffer in pool.buffers:
            assert bool((buffer.view(2, SLOT_COUNT, -1)[:, 40:56] == value).all())
    for snapshot in snapshots.values():
        tide.discard(snapshot)
    spill.close()
    assert {} == well.kept
    hung.gate.set()


# ---- what is shared ---------------------------------------------------------------------


Kept = Callable[..., tuple[Tide, Spill, FaultyTier]]


@pytest.fixture
def kept(device: CPUDevice) -> Iterator[Kept]:
    """Makes a tide over a tier in memory, in which a snapshot's key is its name."""
    geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
    pool, opened = Pool.create(geometry, device, page_count=SLOT_COUNT // 4), []

    def make(below: FaultyTier | None = None) -> tuple[Tide, Spill, FaultyTier]:
        below = below or FaultyTier(random.Random(1), 1 << 20)
        arena = HostArena(device, limit_bytes=1 << 14, block_bytes=512)
        spill = Spill(arena, [below], name_of=lambda key: key)
        opened.append((spill, arena))
        return Tide(pool, arena, spill=spill), spill, below

    yield make
    for spill, arena in opened:
        spill.close()
        assert 0 == arena.used_bytes


def test_what_is_shared_stays_in_the_tier_when_it_is_forgotten(kept: Kept) -> None:
    """Another spill finds it by its name, in the order that it asks for."""
    tide, spill, below = kept()
    for key in ("shared/a", "shared/b", "mine"):
        snapshot = tide.offload(range(8), key=key)
        spill.make_room(tide.arena.block_count)
        assert key in below.kept
        tide.discard(snapshot)
    spill.close()
    assert ["shared/a", "shared/b"] == list(below.kept)
    tide, spill, _ = kept(below)
    search = spill.seek(["shared/b", "shared/a", "shared/c", "shared/a"])
    search.job.wait()
    found = spill.take(search)
    assert ["shared/b", "shared/a"] == [snapshot.seal.key for snapshot in found]
    while not spill.read_ahead(found[0]):
        pass
    tide.restore(found[0], range(8, 16), key="shared/b")
    for snapshot in found:
        tide.discard(snapshot)
    spill.close()
    assert ["shared/a", "shared/b"] == list(below.kept)


def test_requests_are_left_before_what_is_shared(kept: Kept) -> None:
    """Whatever was used last; only requests are counted."""
    tide, spill, below = kept()
    snapshots = [tide.offload(range(8), key=key) for key in ("shared/a", "one", "shared/b", "two")]
    assert 2 == spill.leave()
    assert ["one", "two", "shared/a", "shared/b"] == list(below.kept)
    for snapshot in snapshots:
        tide.discard(snapshot)


@pytest.mark.parametrize("is_same", [True, False])
def test_what_the_tier_has_already_is_not_written(kept: Kept, is_same: bool) -> None:
    """Other bytes under the name are replaced, since its reader compares seals."""
    tide, spill, below = kept()
    slots = [range(8), range(8) if is_same else range(8, 16)]
    for number, buffer in enumerate(tide.pool.buffers):
        buffer.view(-1)[:] = torch.arange(buffer.numel()) % (251 - number)
    for part in slots:
        snapshot = tide.offload(part, key="shared/a")
        spill.make_room(tide.arena.block_count)
        assert snapshot.seal == below.kept["shared/a"][0]
        tide.discard(snapshot)
    assert (1 if is_same else 2) == spill.stats.spills


@pytest.mark.parametrize(("block_bytes", "fits"), [(1024, True), (256, False)])
def test_arena_of_smaller_blocks_is_never_written_beyond_one(
    device: CPUDevice, tmp_path: Path, block_bytes: int, fits: bool
) -> None:
    """What an earlier process left in larger chunks is a miss, and no other lease changes."""
    geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
    pool = Pool.create(geometry, device, page_count=SLOT_COUNT // 4)
    arena = HostArena(device, limit_bytes=4096, block_bytes=1024)
    with (
        closing(DiskTier(tmp_path / "tier", limit_bytes=1 << 20)) as disk,
        closing(Spill(arena, [disk], name_of=str)) as spill,
    ):
        tide = Tide(pool, arena, spill=spill)
        snapshot = tide.offload(range(16), key="one")
        assert 1 == spill.leave()
        tide.discard(snapshot)
    arena = HostArena(device, limit_bytes=4096, block_bytes=block_bytes)
    first, others = arena.lease(1), arena.lease(arena.block_count - 1)
    for block in others.blocks:
        block.bytes_view(block_bytes)[:] = bytes([7]) * block_bytes
    first.release()
    with (
        closing(DiskTier(tmp_path / "tier", limit_bytes=1 << 20)) as disk,
        closing(Spill(arena, [disk])) as spill,
    ):
        tide, found = Tide(pool, arena, spill=spill), spill.find("one")
        if found is not None:
            tide.restore(found, range(16), key="one")
            tide.discard(found)
        misses = spill.stats.tiers["disk"].misses["gone"]
        assert (fits, int(not fits)) == (found is not None, misses)
    assert all(bytes([7]) * block_bytes == bytes(b.bytes_view(block_bytes)) for b in others.blocks)
    others.release()
    assert not list((tmp_path / "tier").glob("??/*"))


def test_who_is_in_a_hurry_waits_for_no_silent_tier(device: CPUDevice) -> None:
    """Nobody waits for it again before it has answered."""
    arena = HostArena(device, limit_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    tier = SilentTier()
    in_case_of_failure = threading.Timer(60, tier.gate.set)
    in_case_of_failure.start()
    spill = Spill(arena, [tier], deadline_s=3600)
    assert spill.find("a", 0.01) is None
    assert spill.find("b") is None
    assert not tier.gate.is_set()
    in_case_of_failure.cancel()
    tier.gate.set()
    spill.close()
