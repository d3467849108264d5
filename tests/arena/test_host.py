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
    """Where each block lies: the address of its slab, and its offset there."""
    return [(block.slab.data_ptr(), block.offset) for block in blocks]


def make_arena(limit_bytes: int, block_bytes: int) -> tuple[HostArena, LazyDevice]:
    """An arena, and the device that knows what it took."""
    device = LazyDevice()
    return HostArena(device, limit_bytes=limit_bytes, block_bytes=block_bytes), device


class ArenaMachine(RuleBasedStateMachine):
    """Any sequence of leases and releases, beside the list of leases that are out."""

    @initialize(limit_bytes=st.integers(0, 500), block_bytes=st.sampled_from((1, 3, 16, 64)))
    def start(self, limit_bytes: int, block_bytes: int) -> None:
        """An arena whose limit need not be a multiple of its blocks."""
        self.arena, self.device = make_arena(limit_bytes, block_bytes)
        self.leases: list[Lease] = []
        self.peak_bytes = 0

    @property
    def used_count(self) -> int:
        """Blocks that are out."""
        return sum(len(lease.blocks) for lease in self.leases)

    @rule(block_count=st.integers(0, 40))
    def lease(self, block_count: int) -> None:
        """Fits exactly when the limit holds it, to the byte."""
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
        """Any of them; once more is harmless."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for _ in range(times):
            lease.release()
        assert (True, (), 0) == (lease.released, lease.blocks, lease.size_bytes)

    @invariant()
    def within_limit(self) -> None:
        """What is out is counted, what was taken stays below the limit, no block is out twice."""
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
        """All of it can be given back."""
        for lease in getattr(self, "leases", []):
            lease.release()


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestArena = ArenaMachine.TestCase


def test_the_limit_is_hard_to_the_byte() -> None:
    """One block less than a byte more than it holds is refused."""
    arena, _ = make_arena(limit_bytes=3 * 64 - 1, block_bytes=64)
    with pytest.raises(ArenaFull, match="192 bytes asked for, 0 of 191 in use"):
        arena.lease(3)
    arena.lease(2).release()


def test_full_takes_nothing() -> None:
    """After the refusal what was free can still be had."""
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
    """They cost nothing, even in an arena that has room for none."""
    arena, device = make_arena(limit_bytes=0, block_bytes=64)
    lease = arena.lease(0)
    assert ((), 0, []) == (lease.blocks, arena.peak_bytes, device.host_sizes)
    assert not lease.released
    lease.release()
    assert lease.released


@pytest.mark.parametrize("limit_bytes", [0, 63])
def test_a_limit_below_one_block_leases_none(limit_bytes: int) -> None:
    """It is full from the start, and takes nothing from the system."""
    arena, device = make_arena(limit_bytes=limit_bytes, block_bytes=64)
    with pytest.raises(ArenaFull):
        arena.lease(1)
    assert [] == device.host_sizes


def test_the_steady_state_takes_no_memory() -> None:
    """Leases after the first peak get blocks that were there before."""
    arena, device = make_arena(limit_bytes=64 * 100, block_bytes=64)
    arena.lease(100).release()
    taken = list(device.host_sizes)
    for count in (100, 1, 37, 63, 100):
        first, second = arena.lease(count), arena.lease(100 - count)
        second.release()
        first.release()
    assert taken == device.host_sizes


def test_memory_is_taken_in_slabs_up_to_the_limit() -> None:
    """Blocks as large as a slab come one at a time, small ones many at once."""
    large, large_device = make_arena(limit_bytes=250 << 20, block_bytes=80 << 20)
    lease = large.lease(2)
    assert [80 << 20, 80 << 20] == large_device.host_sizes
    lease.release()
    small, small_device = make_arena(limit_bytes=100 << 20, block_bytes=1 << 20)
    small.lease(1).release()
    assert [64 << 20] == small_device.host_sizes
    small.lease(65).release()
    assert [64 << 20, 36 << 20] == small_device.host_sizes


def test_blocks_released_last_are_leased_first() -> None:
    """In their order: they are likely still in cache."""
    arena, _ = make_arena(limit_bytes=64 * 10, block_bytes=64)
    kept, lease = arena.lease(2), arena.lease(3)
    expected = places(lease.blocks)
    lease.release()
    again = arena.lease(3)
    assert expected == places(again.blocks)
    again.release()
    kept.release()


def test_a_forgotten_lease_gives_back_its_blocks_and_says_so() -> None:
    """A leak is a defect of the caller's, not of the arena's books."""
    arena, _ = make_arena(limit_bytes=64 * 4, block_bytes=64)
    leases = [arena.lease(3)]
    with pytest.warns(ResourceWarning, match="lease of 192 bytes was never released"):
        leases.clear()
    assert 0 == arena.used_bytes
    arena.lease(4).release()


@pytest.mark.parametrize("block_count", [0, 2])
def test_a_lease_that_was_released_goes_silently(block_count: int) -> None:
    """Nor is a lease of no blocks worth a warning."""
    arena, _ = make_arena(limit_bytes=64 * 4, block_bytes=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = arena.lease(block_count)
        if block_count:
            lease.release()
        del lease
    assert 0 == arena.used_bytes


@pytest.mark.parametrize("value", [None, "1MiB", 4096.7, *NO_ROWS], ids=name_of)
def test_what_is_no_size_is_refused_when_the_arena_is_made(value: Any) -> None:
    """Not at the first lease, when a request has nowhere else to go."""
    with pytest.raises(LayoutError, match="host arena: block_bytes must be an integer from 1"):
        make_arena(64, value)
    with pytest.raises(LayoutError, match="host arena: limit_bytes must be an integer from 0"):
        make_arena(value, 64)


@pytest.mark.parametrize("value", [None, *NO_ROWS], ids=name_of)
def test_what_is_no_count_of_blocks_is_refused(value: Any) -> None:
    """And nothing is leased."""
    arena, _ = make_arena(64 * 4, 64)
    with pytest.raises(LayoutError, match="host arena: block_count must be an integer from 0"):
        arena.lease(value)
    assert 0 == arena.used_bytes


def test_blocks_without_bytes_are_refused() -> None:
    """A block holds at least one byte; a limit of none is an arena that is always full."""
    with pytest.raises(LayoutError, match="block_bytes must be an integer from 1, not 0"):
        make_arena(64, 0)


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_sizes_are_integers_of_any_maker(value: Any) -> None:
    """They are Python's from then on."""
    arena, _ = make_arena(value, value)
    assert (int, int) == (type(arena.limit_bytes), type(arena.block_bytes))
    arena.lease(1).release()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory")])
def test_a_system_without_memory_is_a_full_arena(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One request degrades then; nobody crashes, and nothing was taken."""
    arena, device = make_arena(256, 64)

    def fail(size_bytes: int) -> torch.Tensor:
        raise error

    monkeypatch.setattr(device, "allocate_host", fail)
    with pytest.raises(ArenaFull, match="the system has no 256 bytes"):
        arena.lease(1)
    assert (0, 0) == (arena.used_bytes, arena.reserved_bytes)
