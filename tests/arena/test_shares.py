"""The limit of host memory holds for every byte: blocks, seals, and what moves need beside them."""

from __future__ import annotations

import gc
import random
import resource
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtide.arena import arena_for, arena_of_blocks
from kvtide.device import CPUDevice, open_device
from kvtide.errors import ArenaFull
from kvtide.layout import GQA, Geometry
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom, Snapshot, charge_for
from kvtide.tide import Tide
from kvtide.tier import Spill, Store, Tier
from support.simulated import simulated

WIDE = GQA.bind(dtype="bfloat16", layer=30, token=16, head=3, head_dim=64, v_head_dim=64)
UNEQUAL = GQA.bind(dtype="bfloat16", layer=30, token=16, head=3, head_dim=64, v_head_dim=32)
NARROW = GQA.bind(dtype="float32", layer=4, token=16, head=2, head_dim=8, v_head_dim=8)
GEOMETRIES = pytest.mark.parametrize(
    "geometry", [WIDE, UNEQUAL, NARROW], ids=["wide", "unequal", "narrow"]
)


@pytest.fixture(scope="module")
def device() -> Iterator[CPUDevice]:
    """A device of two lanes."""
    with closing(CPUDevice(lanes=2)) as device:
        yield device


@pytest.fixture
def traced() -> Iterator[None]:
    """Within, Python counts what it and numpy allocate. The blocks of an arena aren't among it."""
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


class BlackHole(Tier):
    """Takes every snapshot and keeps nothing."""

    def contains(self, key: str) -> bool:
        return False

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        pass

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        raise AssertionError("nothing is wanted back")

    def remove(self, key: str) -> None:
        pass


def allocated_bytes() -> int:
    """What Python and numpy have allocated now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@GEOMETRIES
@pytest.mark.parametrize("tokens", [1, 300, 2000])
def test_charge_of_a_snapshot_is_at_least_what_it_takes(
    device: CPUDevice, traced: None, geometry: Geometry, tokens: int
) -> None:
    """It takes that wherever its bytes are: in the arena, or in a tier alone."""
    pool = Pool.create(geometry, device, page_count=2048 // 16)
    arena = arena_for(pool, 64 << 20)
    with closing(Spill(arena, [BlackHole()])) as spill:
        tide = Tide(pool, arena, spill=spill)
        held = [tide.offload(range(tokens)) for _ in range(3)]
        before, charged = allocated_bytes(), arena.charged_bytes
        held += [tide.offload(range(tokens)) for _ in range(20)]
        spill.make_room(arena.block_count)
        taken = allocated_bytes() - before
        assert 0 < taken <= arena.charged_bytes - charged
        for snapshot in held:
            tide.discard(snapshot)
        del held, snapshot
        assert 0 == arena.charged_bytes


def test_scattered_tokens_are_charged(device: CPUDevice, traced: None) -> None:
    """A seal lists which tokens have rows, and some maps leave every other token out."""
    pool = Pool.create(NARROW, device, page_count=1)
    arena = arena_for(pool, 1 << 20)
    before = allocated_bytes()
    tokens = tuple(range(first, first + 1) for first in range(1000, 3000, 2))
    taken = allocated_bytes() - before
    seal = Seal(NARROW.canonical, "", 4000, (tokens,), ((),), 1 << 16, ())
    charge = charge_for(arena, seal, 1)
    assert 1000 * 100 < taken <= arena.charged_bytes
    del charge
    assert 0 == arena.charged_bytes


def test_seals_have_a_limit(device: CPUDevice) -> None:
    """Snapshots in a tier alone take memory, too. A new one is refused, and none is lost."""
    pool = Pool.create(NARROW, device, page_count=1)
    arena = arena_for(pool, 1 << 20)
    with closing(Spill(arena, [BlackHole()])) as spill:
        tide = Tide(pool, arena, spill=spill)
        held: list[Snapshot] = []
        with suppress(ArenaFull):
            while len(held) < 10_000:
                held.append(tide.offload(range(16)))
        with pytest.raises(ArenaFull, match=f"the seals of {len(held)} snapshots take"):
            tide.offload(range(16))
        assert len(held) > 1000
        assert (4 << 20) - arena.charged_bytes < 4096
        tide.discard(held.pop())
        tide.discard(tide.offload(range(16)))
        for snapshot in held:
            tide.discard(snapshot)
    assert 0 == arena.used_bytes  # now that nothing is being written any more


@GEOMETRIES
@pytest.mark.parametrize("limit_bytes", [0, 1, 1 << 20, 64 << 20, 1 << 30, 100 << 30, 3 << 40])
def test_parts_of_a_limit_are_within_it(
    device: CPUDevice, geometry: Geometry, limit_bytes: int
) -> None:
    """Most of a limit is blocks, and what stands beside them has room in the rest."""
    pool = Pool.create(geometry, device, page_count=1)
    arena = arena_for(pool, limit_bytes)
    blocks_bytes = arena.block_count * arena.block_bytes
    assert limit_bytes == arena.limit_bytes
    assert blocks_bytes <= limit_bytes * (15 if limit_bytes >= 64 << 20 else 16) // 16
    if limit_bytes >= 1 << 30:
        assert blocks_bytes >= limit_bytes * 0.7
    if limit_bytes:
        assert arena.block_count >= 10 or limit_bytes <= 1 << 20


@GEOMETRIES
@pytest.mark.parametrize("is_random", [False, True])
def test_moves_stay_within_what_is_kept_for_them(
    device: CPUDevice, traced: None, geometry: Geometry, is_random: bool
) -> None:
    """A request that fills all blocks has the most rows, and scattered slots the most units."""
    token_count = max(1 << 12, (64 << 20) // geometry.token_bytes)
    pool = Pool.create(geometry, device, page_count=2 * token_count // 16)
    arena = arena_for(pool, token_count * geometry.token_bytes)
    tide = Tide(pool, arena)
    tokens = arena.block_count * (arena.block_bytes // geometry.token_bytes)
    slots = np.arange(2 * token_count)
    if is_random:
        np.random.default_rng(1).shuffle(slots)
    slots = slots[:tokens]
    tide.discard(tide.offload(slots[:100]))
    before = allocated_bytes()
    tracemalloc.reset_peak()
    snapshot = tide.offload(slots)
    tide.restore(snapshot, slots)
    taken = tracemalloc.get_traced_memory()[1] - before - arena.charged_bytes
    beside_bytes = arena.limit_bytes - arena.block_count * arena.block_bytes
    assert 0 < taken <= beside_bytes - arena.limit_bytes // 32, "a 32nd is the tiers'"
    tide.discard(snapshot)


@pytest.mark.parametrize("limit_bytes", [64 << 20, 100 << 20, 300 << 20, 1000 << 20])
@pytest.mark.parametrize("row_bytes", [64, 3 << 10, 160 << 10])
def test_pinned_memory_of_all_blocks_is_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, row_bytes: int
) -> None:
    """torch takes it in powers of two. Only of the last one a large part may be wasted."""
    taken: list[int] = []

    def take(size_bytes: int) -> torch.Tensor:
        taken.append(1 << (size_bytes - 1).bit_length())
        return torch.empty(size_bytes, dtype=torch.uint8)

    with simulated("eager") as name, closing(open_device(name)) as device:
        monkeypatch.setattr(device, "allocate_host", take)
        geometry = GQA.bind(
            dtype="uint8", layer=20, token=1, head=1, head_dim=row_bytes, v_head_dim=row_bytes
        )
        arena = arena_for(Pool.create(geometry, device, page_count=1), limit_bytes)
        arena.lease(arena.block_count).release()
        assert limit_bytes * 0.4 < arena.reserved_bytes <= sum(taken)
        assert sum(taken) <= limit_bytes * 15 // 16


def resident_bytes() -> int:
    """The memory that the system has given to this process."""
    with Path("/proc/self/statm").open() as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("block_bytes", [1 << 10, 36 << 10, 3 << 20])
@pytest.mark.parametrize("limit_bytes", [64 << 20, (1 << 30) + 12345])
def test_blocks_and_what_each_takes_beside_are_within_the_limit(
    limit_bytes: int, block_bytes: int, device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other one would fit. Pinned memory is within it, too, which comes in powers of two."""
    arena = arena_of_blocks(device, limit_bytes, block_bytes=block_bytes, beside_bytes=2_000)
    left_bytes = limit_bytes - arena.block_count * (block_bytes + 2_000)
    assert 0 <= left_bytes < block_bytes + 2_000
    with pytest.raises(ArenaFull):
        arena.lease(arena.block_count + 1)

    taken: list[int] = []

    def take(size_bytes: int) -> torch.Tensor:
        taken.append(1 << (size_bytes - 1).bit_length())
        return torch.empty(size_bytes, dtype=torch.uint8)

    with simulated("eager") as name, closing(open_device(name)) as pinning:
        monkeypatch.setattr(pinning, "allocate_host", take)
        arena = arena_of_blocks(pinning, limit_bytes, block_bytes=block_bytes, beside_bytes=2_000)
        arena.lease(arena.block_count).release()
        assert sum(taken) + arena.block_count * 2_000 <= limit_bytes


def test_process_grows_by_no_more_than_the_limit(device: CPUDevice, tmp_path: Path) -> None:
    """There are a disk below, a move under way, and four times as many bytes as the limit."""
    pool = Pool.create(WIDE, device, page_count=2048 // 16)
    for buffer in pool.buffers:
        buffer.fill_(1)
    limit_bytes, peak = 64 << 20, 0
    chance = random.Random(1)
    before = resident_bytes()
    arena = arena_for(pool, limit_bytes)
    with closing(Store(arena, tmp_path, 2 << 30)) as store:
        tide = Tide(pool, arena, spill=store.spill)
        held: list[tuple[Snapshot, list[int]]] = []
        while sum(sum(snapshot.seal.used_bytes) for snapshot, _ in held) < 4 * limit_bytes:
            slots = chance.sample(range(2048), chance.randint(100, 1000))
            held.append((tide.offload(slots), slots))
            peak = max(peak, resident_bytes())
        for snapshot, slots in held:
            tide.restore(snapshot, slots)
            peak = max(peak, resident_bytes())
            tide.discard(snapshot)
    assert limit_bytes // 2 < peak - before <= limit_bytes
