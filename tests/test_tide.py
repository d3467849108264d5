from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, SlotError, SnapshotDamaged
from kvtide.layout import Geometry
from kvtide.tide import Tide
from support.lazy_device import LazyDevice
from support.pools import (
    POOL_KINDS,
    PoolCase,
    fill,
    geometries,
    image_of,
    make_pool,
    poison,
    rows_of,
    same_image,
    slot_lists,
    small_geometry,
    with_rows,
)
from support.tides import BLOCK_BYTES, TOKEN_BYTES, damage, make_tide

# ---- the first test of everything ----------------------------------------------------


@dataclass(frozen=True)
class RoundTrip:
    """A move between two pools of equal geometry; each has its kind, page size and arena."""

    source: Geometry
    target: Geometry
    kinds: tuple[str, str]
    block_bytes: tuple[int, int]
    source_slots: list[int]
    target_slots: list[int]
    page_counts: tuple[int, int]
    seed: int


@st.composite
def round_trips(draw: st.DrawFn) -> RoundTrip:
    """Draws token counts, often around the ends of chunks, and slots of all styles."""
    source = draw(geometries())
    page_size = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    sizes: dict[str, Any] = dict(source.sizes)
    target = source.layout.bind(dtype=source.planes[0].dtype, token=page_size, **sizes)
    chunk_tokens = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    room = 2 * chunk_tokens + 3
    page_counts = (-(-room // source.page_size), -(-room // page_size))
    near = st.sampled_from((0, chunk_tokens, 2 * chunk_tokens))
    count = draw(st.integers(0, room) | st.tuples(near, st.integers(-1, 1)).map(sum))
    count = min(room, max(0, count))
    slack = draw(st.integers(0, source.token_bytes - 1))
    return RoundTrip(
        source,
        target,
        draw(st.tuples(st.sampled_from(POOL_KINDS), st.sampled_from(POOL_KINDS))),
        (chunk_tokens * source.token_bytes + slack, draw(st.integers(1, 5)) * source.token_bytes),
        draw(slot_lists(page_counts[0] * source.page_size, source.page_size, count)),
        draw(slot_lists(page_counts[1] * page_size, page_size, count)),
        page_counts,
        draw(st.integers(0, 2**32)),
    )


def gaps_of(case: PoolCase) -> list[bytes]:
    """Returns all memory of a pool without its slots, which a restore must never change."""
    kept, image = [memory.copy() for memory in case.memory], image_of(case.pool)
    for part, rows in image.items():
        rows_of(case.pool, *part)[:] = 0
        del rows
    gaps = [memory.tobytes() for memory in case.memory]
    for memory, before in zip(case.memory, kept, strict=True):
        memory[:] = before
    return gaps


@settings(max_examples=250)
@given(round_trips())
def test_every_byte_comes_back_and_no_other_changes(device: CPUDevice, trip: RoundTrip) -> None:
    """The test fills, offloads, poisons, restores into other slots, and compares every byte."""
    case = make_pool(trip.kinds[0], trip.source, device, trip.page_counts[0])
    other = make_pool(trip.kinds[1], trip.target, device, trip.page_counts[1])
    fill(case, trip.seed)
    fill(other, trip.seed + 1)
    source, target = (
        Tide(pool, HostArena(device, limit_bytes=1 << 20, block_bytes=block_bytes))
        for pool, block_bytes in zip((case.pool, other.pool), trip.block_bytes, strict=True)
    )
    saved, before, gaps = image_of(case.pool), image_of(other.pool), gaps_of(other)

    snapshot = source.offload(trip.source_slots)
    unchanged = same_image(saved, image_of(case.pool))
    poison(case.pool, trip.source_slots)
    poisoned = image_of(case.pool)
    try:
        target.restore(snapshot, trip.target_slots)
    finally:
        source.discard(snapshot)

    assert unchanged, "an offload changes nothing of the pool"
    expected = with_rows(before, trip.target_slots, saved, trip.source_slots)
    assert same_image(expected, image_of(other.pool))
    assert gaps == gaps_of(other)
    assert same_image(poisoned, image_of(case.pool))
    assert 0 == source.arena.used_bytes


@pytest.mark.parametrize("kind", POOL_KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nans_and_negative_zero_keep_their_bits(device: CPUDevice, kind: str, dtype: str) -> None:
    """The bytes have NaNs of many payloads, both zeros, infinities and subnormals."""
    bits = {
        "bfloat16": [0x7FC0, 0x7F81, 0xFFBF, 0x7FFF, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001],
        "float16": [0x7E00, 0x7C01, 0xFDFF, 0x7FFF, 0x8000, 0x0000, 0x7C00, 0xFC00, 0x0001],
        "float32": [0x7FC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF, 0x80000000, 0, 0x7F800000],
    }[dtype]
    geometry = small_geometry(dtype=dtype, head_dim=8, v_head_dim=16)
    pool = make_pool(kind, geometry, device, 3).pool
    integers = np.uint32 if dtype == "float32" else np.uint16
    for part in image_of(pool):
        words = rows_of(pool, *part).view(np.uint8)
        words[:] = np.resize(np.array(bits, integers).view(np.uint8), words.shape)
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 16, block_bytes=1 << 10))
    saved = image_of(pool)
    snapshot = tide.offload([1, 2, 3])
    poison(pool, range(12))
    tide.restore(snapshot, [7, 9, 8])
    tide.discard(snapshot)
    restored = image_of(pool)
    for part, rows in saved.items():
        assert rows[[1, 2, 3]].tolist() == restored[part][[7, 9, 8]].tolist()


def test_slots_may_overlap_their_own_restore(device: CPUDevice) -> None:
    """The snapshot owns its bytes, so they come back shifted by one within the same slots."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    snapshot = tide.offload(range(10))
    tide.restore(snapshot, range(1, 11))
    tide.discard(snapshot)
    assert same_image(with_rows(before, range(1, 11), before, range(10)), image_of(tide.pool))


def test_a_snapshot_may_be_restored_more_than_once(device: CPUDevice) -> None:
    """A restore doesn't change the snapshot."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    snapshot = tide.offload([3, 4])
    for slots in ([10, 11], [19, 0]):
        tide.restore(snapshot, slots)
        before = with_rows(before, slots, before, [3, 4])
    assert same_image(before, image_of(tide.pool))
    tide.discard(snapshot)


# ---- what is refused, and without an effect ---------------------------------------------------


@pytest.mark.parametrize("block_bytes", [35, 13, 12, 7, 1])
def test_blocks_smaller_than_a_token_hold_parts_of_it(device: CPUDevice, block_bytes: int) -> None:
    """A block holds some layers, or some bytes of one row."""
    case = make_pool("created", small_geometry(), device, 5)
    fill(case, 1)
    before = image_of(case.pool)
    tide = Tide(case.pool, HostArena(device, limit_bytes=1 << 20, block_bytes=block_bytes))
    snapshot = tide.offload([9, 0, 1])
    assert len(snapshot.lease.blocks) >= -(-3 * TOKEN_BYTES // block_bytes)
    tide.restore(snapshot, [3, 12, 4])
    assert same_image(with_rows(before, [3, 12, 4], before, [9, 0, 1]), image_of(case.pool))
    tide.discard(snapshot)


@pytest.mark.parametrize("slots", [[-1], [20], [3, 3], [1.5], torch.tensor([2, 20])])
def test_invalid_slots_are_refused_by_offload_and_restore(device: CPUDevice, slots: Any) -> None:
    """They are refused before anything is leased or written."""
    tide = make_tide(device)
    snapshot = tide.offload(range(len(slots)))
    before, used_bytes = image_of(tide.pool), tide.arena.used_bytes
    with pytest.raises(SlotError):
        tide.offload(slots)
    with pytest.raises(SlotError):
        tide.restore(snapshot, slots)
    assert same_image(before, image_of(tide.pool))
    assert used_bytes == tide.arena.used_bytes
    tide.discard(snapshot)


def test_a_full_arena_refuses_one_offload_and_no_other(device: CPUDevice) -> None:
    """A smaller offload still succeeds, and the existing snapshot stays whole."""
    tide = make_tide(device, block_count=2)
    before = image_of(tide.pool)
    snapshot = tide.offload(range(4))
    with pytest.raises(ArenaFull):
        tide.offload(range(5))
    small = tide.offload(range(4, 8))
    tide.restore(snapshot, range(8, 12))
    assert same_image(with_rows(before, range(8, 12), before, range(4)), image_of(tide.pool))
    tide.discard(snapshot)
    tide.discard(small)
    assert 0 == tide.arena.used_bytes


def test_an_offload_that_could_not_start_gives_its_blocks_back() -> None:
    """For example, the device was closed."""
    device = CPUDevice(lanes=1)
    tide = make_tide(device)
    device.close()
    with pytest.raises(RuntimeError):
        tide.offload(range(4))
    assert (0, 0) == (tide.arena.used_bytes, tide.stats.offloads)


def test_an_offload_that_failed_gives_its_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for the ticket raises the error."""

    def failing(_: object) -> int:
        raise OSError("of the copy")

    monkeypatch.setattr("kvtide.transfer.run.xxhash.xxh3_64_intdigest", failing)
    tide = make_tide(LazyDevice())
    ticket = tide.start_offload(range(4))
    for _ in range(2):
        with pytest.raises(OSError, match="of the copy"):
            ticket.wait()
    assert (0, 0) == (tide.arena.used_bytes, tide.stats.offloads)


def test_discarding_twice_is_harmless(device: CPUDevice) -> None:
    """The blocks are given back only once."""
    tide = make_tide(device, block_count=2)
    snapshot = tide.offload(range(4))
    tide.discard(snapshot)
    other = tide.offload(range(4))
    tide.discard(snapshot)
    assert BLOCK_BYTES == tide.arena.used_bytes
    tide.discard(other)


def test_moved_bytes_are_counted_when_they_arrived() -> None:
    """Bytes that haven't arrived, or didn't arrive, don't count."""
    tide = make_tide(LazyDevice())
    ticket = tide.start_offload(range(5))
    assert (0, 0) == (tide.stats.offloads, tide.stats.offloaded_bytes)
    snapshot = ticket.wait()
    tide.restore(snapshot, range(5, 10))
    damage(snapshot)
    with pytest.raises(SnapshotDamaged):
        tide.restore(snapshot, range(5, 10))
    stats = tide.stats
    assert (1, 5 * TOKEN_BYTES) == (stats.offloads, stats.offloaded_bytes)
    assert (1, 5 * TOKEN_BYTES) == (stats.restores, stats.restored_bytes)
    tide.discard(snapshot)
