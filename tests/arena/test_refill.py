"""An arena that is filled, freed and refilled many times: like a naive model, and without cost."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvtide.arena import HostArena, Lease
from kvtide.device import Block, CPUDevice
from kvtide.errors import ArenaFull
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from support.lazy_device import LazyDevice

STEPS = 100_000
BLOCK_BYTES = 16
BLOCK_COUNT = 40
MOST_HOLDERS = 12


class Move:
    """A move that ends when the test says so."""

    def __init__(self) -> None:
        self.has_ended = False

    def done(self) -> bool:
        """See Job."""
        return self.has_ended

    def wait(self) -> None:
        """See Job."""
        assert self.has_ended


class Holder:
    """What the naive model knows of a lease: its stamp is in each of its blocks."""

    def __init__(self, lease: Lease, stamp: int) -> None:
        self.lease = lease
        self.stamp = stamp
        self.blocks: list[Block] = []
        self.moves: list[Move] = []

    @property
    def is_moving(self) -> bool:
        return not all(move.has_ended for move in self.moves)


class NaiveArena:
    """Steps of an arena, each beside the same step of a model that only counts and stamps."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.arena = HostArena(
            LazyDevice(), limit_bytes=BLOCK_COUNT * BLOCK_BYTES + 7, block_bytes=BLOCK_BYTES
        )
        self.holders: list[Holder] = []
        self.leaving: list[Holder] = []
        """Released while a move used their blocks."""
        self.owners: dict[tuple[int, int], Holder] = {}
        self.refusals = self.peak_count = 0

    def go(self, step_count: int) -> None:
        acts = [self.lease, self.extend, self.release, self.begin_move, self.end_move]
        for self.step in range(step_count):
            self.chance.choices(acts, (40, 10, 26, 12, 12))[0]()
            used_count = len(self.owners)
            assert used_count * BLOCK_BYTES == self.arena.used_bytes
            assert BLOCK_COUNT - used_count == self.arena.free_count
            self.peak_count = max(self.peak_count, used_count)
            assert self.peak_count * BLOCK_BYTES == self.arena.peak_bytes

    def lease(self) -> None:
        if len(self.holders) == MOST_HOLDERS:
            self.release()
        holder = Holder(self.arena.lease(0), self.step)
        self.holders.append(holder)
        self.take(holder)

    def extend(self) -> None:
        if self.holders:
            self.take(self.chance.choice(self.holders))

    def take(self, holder: Holder) -> None:
        """A lease gets blocks that nobody has, or none: exactly when they fit."""
        count = self.chance.choice((0, 1, 1, 2, 3, 5, 8, 13, 40))
        if len(self.owners) + count > BLOCK_COUNT:
            self.refusals += 1
            with pytest.raises(ArenaFull):
                holder.lease.extend(count)
        else:
            holder.lease.extend(count)
        blocks = holder.lease.blocks
        assert holder.blocks == list(blocks[: len(holder.blocks)])
        for block in blocks[len(holder.blocks) :]:
            assert self.owners.setdefault(place_of(block), holder) is holder
            stamp(block)[:] = holder.stamp
            holder.blocks.append(block)
        assert all(self.owners[place_of(block)] is holder for block in blocks)

    def release(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.chance.randrange(len(self.holders)))
            for _ in range(self.chance.randint(1, 2)):
                holder.lease.release()
            if holder.is_moving:
                self.leaving.append(holder)
            else:
                self.give_back(holder)

    def begin_move(self) -> None:
        if self.holders:
            holder = self.chance.choice(self.holders)
            holder.moves = [move for move in holder.moves if not move.has_ended]
            holder.moves.append(Move())
            holder.lease.use(holder.moves[-1])

    def end_move(self) -> None:
        """A move ends. Until then its blocks were nobody else's, even if they were released."""
        moving = [holder for holder in (*self.holders, *self.leaving) if holder.is_moving]
        if moving:
            holder = self.chance.choice(moving)
            next(move for move in holder.moves if not move.has_ended).has_ended = True
            if not holder.is_moving and holder in self.leaving:
                self.leaving.remove(holder)
                self.give_back(holder)

    def give_back(self, holder: Holder) -> None:
        for block in holder.blocks:
            assert (stamp(block) == holder.stamp).all(), "somebody else wrote a leased block"
            del self.owners[place_of(block)]


def place_of(block: Block) -> tuple[int, int]:
    """The block's slab and its place in the slab."""
    return id(block.slab), block.offset


def stamp(block: Block) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The block's bytes as integers."""
    return np.frombuffer(block.bytes_view(BLOCK_BYTES), np.int64)


def test_steps_of_an_arena_are_those_of_a_naive_model() -> None:
    """In 10^5 steps no block has two holders, none is lost, and a lease fits exactly if it should.

    A block that a move uses stays its lease's until the move has ended, whoever needs room.
    """
    model = NaiveArena(seed=1)
    model.go(STEPS)
    assert model.refusals > STEPS // 100
    assert BLOCK_COUNT == model.peak_count
    for holder in (*model.holders, *model.leaving):
        for move in holder.moves:
            move.has_ended = True
        holder.lease.release()
    assert (0, BLOCK_COUNT) == (model.arena.used_bytes, model.arena.free_count)


# ---- without cost ---------------------------------------------------------------------------

PAGE_BYTES = resource.getpagesize()
LIMIT_BYTES = 16 << 20
TOKENS = 512


@pytest.fixture
def tide() -> Iterator[Tide]:
    """A tide over 16 MiB of host memory, which works in the calling thread alone."""
    geometry = GQA.bind(dtype="uint8", layer=8, token=16, head=2, head_dim=128, v_head_dim=128)
    with closing(CPUDevice(lanes=1)) as device:
        pool = Pool.create(geometry, device, page_count=2 * TOKENS // 16)
        for buffer in pool.buffers:
            buffer.fill_(1)
        yield Tide(pool, HostArena(device, limit_bytes=LIMIT_BYTES, block_bytes=1 << 18))


def refill(tide: Tide, chance: random.Random) -> int:
    """Fills the arena with requests, restores them and discards them; gives the bytes moved."""
    before = tide.stats.offloaded_bytes + tide.stats.restored_bytes
    held = []
    try:
        while True:
            slots = chance.sample(range(2 * TOKENS), chance.randint(TOKENS // 2, TOKENS))
            held.append((tide.offload(slots), slots))
    except ArenaFull:
        pass
    for snapshot, slots in chance.sample(held, len(held)):
        tide.restore(snapshot, slots)
        tide.discard(snapshot)
    return tide.stats.offloaded_bytes + tide.stats.restored_bytes - before


def count_faults() -> int:
    """Pages that the system gave to this thread so far when it first touched them."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_the_steady_state_allocates_nothing_and_faults_no_page(
    tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena that was full once takes no more memory, and its pages are there.

    Python and numpy allocate a little for each move, and may get a fresh page for it now and then:
    one for each thousand pages that move, at most.
    """
    chance = random.Random(1)
    for _ in range(10):
        refill(tide, chance)
    assert tide.arena.reserved_bytes == tide.arena.limit_bytes
    taken: list[int] = []
    monkeypatch.setattr(tide.pool.device, "allocate_host", taken.append)
    before = count_faults()
    moved_pages = sum(refill(tide, chance) for _ in range(20)) // PAGE_BYTES
    faults = count_faults() - before
    assert moved_pages > 20 * LIMIT_BYTES // PAGE_BYTES
    assert faults <= moved_pages // 1000, f"{faults} faults as {moved_pages} pages moved"
    assert [] == taken
