from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.arena import HostArena, Lease
from kvtide.device import Block
from kvtide.errors import ArenaFull, LayoutError
from support.lazy_device import LazyDevice
from support.values import NO_ROWS, ONES, name_of


def places(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """The place of each block: its slab's address, and the offset in the slab."""
    return [(block.slab.data_ptr(), block.offset) for block in blocks]


def make_arena(limit_bytes: int, block_bytes: int) -> tuple[HostArena, LazyDevice]:
    """An arena, and its device, which lists the sizes that the arena took."""
    device = LazyDevice()
    return HostArena(device, limit_bytes=limit_bytes, block_bytes=block_bytes), device


class ArenaMachine(RuleBasedStateMachine):
    """The machine leases and releases in any order, and keeps a list of the leases."""

    @initialize(limit_bytes=st.integers(0, 500), block_bytes=st.sampled_from((1, 3, 16, 64)))
    def start(self, limit_bytes: int, block_bytes: int) -> None:
        """The limit need not be a multiple of the block size."""
        self.arena, self.device = make_arena(limit_bytes, block_bytes)
        self.leases: list[Lease] = []
        self.peak_bytes = 0

    @property
    def used_count(self) -> int:
        """How many blocks are leased."""
        return sum(len(lease.blocks) for lease in self.leases)

    @rule(block_count=st.integers(0, 40))
    def lease(self, block_count: int) -> None:
        """A lease fits exactly if the limit holds it, to the byte."""
        needed_bytes = (self.used_count + block_count) * self.arena.block_bytes
        if needed_bytes > self.arena.limit_bytes:
            with pytest.raises(ArenaFull, match="raise the limit"):
                self.arena.lease(block_count)
            return
        lease = self.arena.lease(block_count)
        assert block_count == len(lease.blocks)
        assert block_count * self.arena.block_bytes == lease.size_bytes
        self.leases.append(lease)
        self.peak_bytes = max(self.peak_bytes, needed_bytes)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        """Releases a lease, once or twice."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for _ in range(times):
            lease.release()
        assert (True, (), 0) == (lease.released, lease.blocks, lease.size_bytes)

    @invariant()
    def within_limit(self) -> None:
        """The counts are right, the limit holds, and no block is in two leases."""
        if not hasattr(self, "arena"):
            return
        assert self.used_count * self.arena.block_bytes == self.arena.used_bytes
        assert self.arena.used_bytes <= self.arena.reserved_bytes <= self.arena.limit_bytes
        assert sum(self.device.host_sizes) == self.arena.reserved_bytes
        assert self.peak_bytes == self.arena.peak_bytes
        blocks = [block for lease in self.leases for block in lease.blocks]
        assert len(blocks) == len(set(places(blocks)))
        for block in blocks:
            assert 0 == block.offset % self.arena.block_bytes
            assert block.offset + self.arena.block_bytes <= block.slab.numel()

    def teardown(self) -> None:
        """All leases can be released."""
        for lease in getattr(self, "leases", []):
            lease.release()


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestArena = ArenaMachine.TestCase


def test_the_limit_is_hard_to_the_byte() -> None:
    """Three blocks of 64 bytes don't fit in 191 bytes, two do."""
    arena, _ = make_arena(limit_bytes=3 * 64 - 1, block_bytes=64)
    with pytest.raises(ArenaFull, match="192 bytes asked for, 0 of 191 in use"):
        arena.lease(3)
    arena.lease(2).release()


def test_a_full_arena_takes_nothing() -> None:
    """After the refusal the free blocks can still be leased."""
    arena, _ = make_arena(limit_bytes=4 * 64, block_bytes=64)
    first = arena.lease(2)
    with pytest.raises(ArenaFull):
        arena.lease(3)
    assert 128 == arena.used_bytes
    second = arena.lease(2)
    assert 256 == arena.used_bytes
    first.release()
    second.release()


def test_zero_blocks_are_valid() -> None:
    """They cost nothing, even in an arena whose limit is 0."""
    arena, device = make_arena(limit_bytes=0, block_bytes=64)
    lease = arena.lease(0)
    assert ((), 0, []) == (lease.blocks, arena.peak_bytes, device.host_sizes)
    assert not lease.released
    lease.release()
    assert lease.released


@pytest.mark.parametrize("limit_bytes", [0, 63])
def test_a_limit_below_one_block_leases_none(limit_bytes: int) -> None:
    """The arena is full from the start and takes nothing from the system."""
    arena, device = make_arena(limit_bytes=limit_bytes, block_bytes=64)
    with pytest.raises(ArenaFull):
        arena.lease(1)
    assert [] == device.host_sizes


def test_the_steady_state_takes_no_memory() -> None:
    """After the first peak the arena takes no more memory from the system."""
    arena, device = make_arena(limit_bytes=64 * 100, block_bytes=64)
    arena.lease(100).release()
    taken = list(device.host_sizes)
    for count in (100, 1, 37, 63, 100):
        first, second = arena.lease(count), arena.lease(100 - count)
        second.release()
        first.release()
    assert taken == device.host_sizes


def test_memory_is_taken_in_slabs_up_to_the_limit() -> None:
    """A large block comes alone; many small blocks come together."""
    large, large_device = make_arena(limit_bytes=250 << 20, block_bytes=80 << 20)
    lease = large.lease(2)
    assert [80 << 20, 80 << 20] == large_device.host_sizes
    lease.release()
    small, small_device = make_arena(limit_bytes=200 << 20, block_bytes=1 << 20)
    small.lease(1).release()
    assert [128 << 20] == small_device.host_sizes
    small.lease(129).release()
    assert [128 << 20, 72 << 20] == small_device.host_sizes


def test_blocks_released_last_are_leased_first() -> None:
    """They come in the same order, since they are likely still in cache."""
    arena, _ = make_arena(limit_bytes=64 * 10, block_bytes=64)
    kept, lease = arena.lease(2), arena.lease(3)
    expected = places(lease.blocks)
    lease.release()
    again = arena.lease(3)
    assert expected == places(again.blocks)
    again.release()
    kept.release()


def test_a_forgotten_lease_gives_back_its_blocks_and_says_so() -> None:
    """A leak is the caller's defect; the arena's counts stay right."""
    arena, _ = make_arena(limit_bytes=64 * 4, block_bytes=64)
    leases = [arena.lease(3)]
    with pytest.warns(ResourceWarning, match="lease of 192 bytes was never released"):
        leases.clear()
    assert 0 == arena.used_bytes
    arena.lease(4).release()


@pytest.mark.parametrize("block_count", [0, 2])
def test_a_released_lease_is_forgotten_without_a_warning(block_count: int) -> None:
    """A lease of no blocks causes no warning either."""
    arena, _ = make_arena(limit_bytes=64 * 4, block_bytes=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = arena.lease(block_count)
        if block_count:
            lease.release()
        del lease
    assert 0 == arena.used_bytes


@pytest.mark.parametrize("value", [None, "1MiB", 4096.7, *NO_ROWS], ids=name_of)
def test_an_invalid_size_is_refused_when_the_arena_is_made(value: Any) -> None:
    """The first lease would be too late: a request would have nowhere else to go."""
    with pytest.raises(LayoutError, match="host arena: block_bytes must be an integer from 1"):
        make_arena(64, value)
    with pytest.raises(LayoutError, match="host arena: limit_bytes must be an integer from 0"):
        make_arena(value, 64)


@pytest.mark.parametrize("value", [None, *NO_ROWS], ids=name_of)
def test_an_invalid_count_of_blocks_is_refused(value: Any) -> None:
    """Nothing is leased then."""
    arena, _ = make_arena(64 * 4, 64)
    with pytest.raises(LayoutError, match="host arena: block_count must be an integer from 0"):
        arena.lease(value)
    assert 0 == arena.used_bytes


def test_blocks_without_bytes_are_refused() -> None:
    """A block holds at least one byte. A limit of 0 is valid: that arena is always full."""
    with pytest.raises(LayoutError, match="block_bytes must be an integer from 1, not 0"):
        make_arena(64, 0)


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_sizes_may_be_integers_of_python_numpy_and_torch(value: Any) -> None:
    """The arena keeps them as Python's."""
    arena, _ = make_arena(value, value)
    assert (int, int) == (type(arena.limit_bytes), type(arena.block_bytes))
    arena.lease(1).release()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory")])
def test_a_system_without_memory_is_a_full_arena(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The lease raises ArenaFull, and nothing was taken."""
    arena, device = make_arena(256, 64)

    def fail(size_bytes: int) -> torch.Tensor:
        raise error

    monkeypatch.setattr(device, "allocate_host", fail)
    with pytest.raises(ArenaFull, match="the system has no 256 bytes"):
        arena.lease(1)
    assert (0, 0) == (arena.used_bytes, arena.reserved_bytes)
