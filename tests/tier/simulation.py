"""A tide over an arena of few blocks and tiers that fail: random steps, checked after each."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import Spill
from kvtide.tier.entry import State
from tier.faulty_disk import FaultyDisk
from tier.faulty_mooncake import FaultyMooncake
from tier.faulty_tiers import Below, Clock, FaultyTier, SimulatedWorkers, Unsteady

TOKEN_BYTES = 64
BLOCK_BYTES = 8 * TOKEN_BYTES
SLOT_COUNT = 64
_MOST_LIVE = 48

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]


@cache
def _content(value: int, count: int) -> Bytes:
    """The bytes of `count` tokens of a request: each token has its own, uint8 [token, 16]."""
    return ((value + np.arange(count))[:, None] + np.arange(16) * 7).astype(np.uint8)


class World:
    """A tide over an arena, and tiers below it that fail as often as the test says."""

    def __init__(
        self,
        seed: int,
        device: CPUDevice,
        *,
        block_count: int = 8,
        limits: tuple[int, ...] = (1 << 16,),
        faults: float = 0.0,
        hangs: float = 0.0,
        make_below: Callable[[random.Random, Clock], list[Below]] | None = None,
    ) -> None:
        """`limits` are those of tiers in memory, unless `make_below` gives others."""
        self.chance = random.Random(seed)
        self.clock = Clock()
        geometry = GQA.bind(dtype="uint8", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        self.pool = Pool.create(geometry, device, page_count=SLOT_COUNT // 4)
        self.arena = HostArena(
            device, limit_bytes=block_count * BLOCK_BYTES, block_bytes=BLOCK_BYTES
        )
        self.tiers = [FaultyTier(self.chance, limit, faults) for limit in limits]
        self.below: list[Below] = [*self.tiers]
        if make_below is not None:
            self.tiers, self.below = [], make_below(self.chance, self.clock)
        self.unsteady = [
            Unsteady(below, self.chance, self.clock, faults / 4) for below in self.below
        ]
        self.hang(hangs)
        self.workers = SimulatedWorkers(self.chance, self.clock)
        self.spill = Spill(
            self.arena,
            self.unsteady,
            name_of=lambda key: str(int(key) % 500),  # a random name can't be replayed
            workers=self.workers,
            clock=self.clock,
            sleep=self.clock.sleep,
            deadline_s=5.0,
        )
        self.tide = Tide(self.pool, self.arena, spill=self.spill)
        self._orders: list[Slots] = [
            np.array(self.chance.sample(range(SLOT_COUNT), SLOT_COUNT)) for _ in range(64)
        ]
        self._rows: list[Bytes] = [
            buffer.numpy().reshape(2, SLOT_COUNT, 16) for buffer in self.pool.buffers
        ]

    def hang(self, share: float) -> None:
        """So many calls of the tiers hang from now on."""
        for tier in self.unsteady:
            tier.hang_share = share

    def calm(self) -> None:
        """Nothing fails from now on."""
        self.hang(0.0)
        self.workers.wake()
        for tier in self.unsteady:
            tier.fault_share = 0.0
        for below in self.below:
            below.fault_share = 0.0

    def fill(self, slots: Slots, value: int) -> None:
        """Writes bytes that follow from the value into all rows of the slots."""
        for rows in self._rows:
            rows[:, slots] = _content(value % 256, len(slots))

    def holds(self, slots: Slots, value: int) -> bool:
        """Whether the slots have exactly these bytes."""
        content = _content(value % 256, len(slots))
        return all(bool((rows[:, slots] == content).all()) for rows in self._rows)

    def save(self, value: int, count: int = 16, *, by_ticket: bool = False) -> Snapshot:
        """A snapshot of slots with the bytes of `value`; the slots are poisoned afterwards."""
        slots = self.chance.choice(self._orders)[:count]
        self.fill(slots, value)
        if by_ticket:
            snapshot = self.tide.start_offload(slots, key=str(value)).wait()
        else:
            snapshot = self.tide.offload(slots, key=str(value))
        self.fill(slots, value + 101)
        return snapshot

    def load(self, snapshot: Snapshot, value: int, *, by_ticket: bool = False) -> None:
        """Restores a snapshot; the bytes must be those of `value`."""
        slots = self.chance.choice(self._orders)[: snapshot.token_count]
        self.fill(slots, value + 55)
        try:
            if by_ticket:
                self.tide.start_restore(snapshot, slots, key=str(value)).wait()
            else:
                self.tide.restore(snapshot, slots, key=str(value))
        except (SnapshotDamaged, SnapshotMiss, ArenaFull):
            assert self.holds(slots, value + 55), "a restore that failed has written"
            raise
        assert self.holds(slots, value), "other bytes"

    def held_blocks(self) -> int:
        """How many blocks the books say are in use, also by moves that nobody wants any more."""
        entries = self.spill._entries
        count = sum([entry.block_count for entry in entries.near.values()])
        for entry in self.spill._moving:
            is_unwanted = entry.state in (State.REMOVED, State.LOST)
            if is_unwanted and entry.move is not None and not entry.move.job.done():
                count += entry.block_count
        return count


class Walk:
    """Random steps in a world, which is checked after each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.live: dict[int, Snapshot] = {}
        self.outcomes = {"hits": 0, "misses": 0, "full": 0}
        self.steps = 0

    def go(self, step_count: int) -> dict[str, int]:
        """Takes steps, then discards all; gives how often restores hit and missed."""
        acts = [
            *(self.save, self.load, self.read_ahead, self.discard),
            *(self.pass_time, self.work, self.harm),
        ]
        for act in self.world.chance.choices(acts, (34, 25, 10, 10, 2, 17, 2), k=step_count):
            self.steps += 1
            act()
            self.check()
        self.end()
        return self.outcomes

    def check(self) -> None:
        """Free plus held is the total, and no limit is exceeded."""
        world = self.world
        arena = world.arena
        used = arena.block_count - arena.free_count
        assert world.held_blocks() == used
        assert arena.used_bytes <= arena.limit_bytes
        if self.steps % 64 == 0:
            for below in world.below:
                below.check()

    def end(self) -> None:
        """All moves end, and nothing is left anywhere, once the tiers work again."""
        world = self.world
        world.calm()
        for snapshot in self.live.values():
            world.tide.discard(snapshot)
        for _ in range(2):  # what was written may have to be removed
            world.workers.close()
            world.spill.settle()
        assert [] == world.spill._moving
        assert [] == world.workers.jobs
        assert 0 == len(world.spill._entries)
        assert 0 == world.arena.used_bytes
        for tier in world.spill._tiers:
            world.clock.now += 100
            tier.tidy()
        assert all([] == below.left() for below in world.below)

    def any_value(self) -> int | None:
        return self.world.chance.choice(list(self.live)) if self.live else None

    def save(self) -> None:
        if len(self.live) >= _MOST_LIVE:
            self.discard()
        count = self.world.chance.choice((0, 1, 8, 9, 16, 33))
        by_ticket = self.world.chance.random() < 0.01
        try:
            self.live[self.steps] = self.world.save(self.steps, count, by_ticket=by_ticket)
        except ArenaFull:
            self.outcomes["full"] += 1

    def load(self) -> None:
        value = self.any_value()
        if value is None:
            return
        by_ticket = self.world.chance.random() < 0.01
        try:
            self.world.load(self.live[value], value, by_ticket=by_ticket)
            self.outcomes["hits"] += 1
        except (SnapshotDamaged, SnapshotMiss):
            self.outcomes["misses"] += 1
            self.world.tide.discard(self.live.pop(value))
        except ArenaFull:
            self.outcomes["full"] += 1

    def read_ahead(self) -> None:
        value = self.any_value()
        if value is not None:
            self.world.tide.read_ahead(self.live[value])

    def discard(self) -> None:
        value = self.any_value()
        if value is not None:
            self.world.tide.discard(self.live.pop(value))

    def pass_time(self) -> None:
        self.world.clock.now += self.world.chance.choice((-5.0, 0.1, 40.0))
        self.world.workers.wake()

    def harm(self) -> None:
        for below in self.world.below:
            if below.fault_share:
                below.harm()

    def work(self) -> None:
        self.world.workers.step()
        self.world.spill.settle()


# ---- tiers of all kinds ---------------------------------------------------------------------

KINDS = ("memory", "disk", "mooncake", "disk over mooncake")


def walk(kind: str, seed: int, step_count: int, device: CPUDevice, folder: Path) -> dict[str, int]:
    """A walk over tiers of a kind, all of which follows from the seed.

    `folder` is for files. Gives how often restores hit and missed; a failure names the seed.
    """
    fault_share = (0.0, 0.02, 0.1)[seed % 3]
    walk: Walk | None = None
    try:
        with ExitStack() as opened:

            def make_below(chance: random.Random, clock: Clock) -> list[Below]:
                return _make_below(kind, chance, clock, folder, fault_share, opened)

            world = World(
                seed, device, faults=fault_share, hangs=(0.0, 0.01)[seed % 2], make_below=make_below
            )
            walk = Walk(world)
            return walk.go(step_count)
    except BaseException as error:
        steps = 0 if walk is None else walk.steps
        raise AssertionError(
            f"tiers: {kind}, seed {seed}, step {steps}; once more: python "
            f"benchmarks/tiers/soak.py --kind {kind!r} --seed {seed} --steps {step_count}"
        ) from error


def _make_below(
    kind: str,
    chance: random.Random,
    clock: Clock,
    folder: Path,
    fault_share: float,
    opened: ExitStack,
) -> list[Below]:
    made: list[Below] = []
    if kind == "memory":
        limits = chance.choice(((1 << 12, 1 << 14), (1 << 13,), (1 << 16, 100)))
        made += [FaultyTier(chance, limit, fault_share) for limit in limits]
    if "disk" in kind:
        keeps_used = chance.random() < 0.8
        limit_bytes = chance.choice((1 << 16, 1 << 18))
        share = fault_share / 4  # a put makes about eight calls
        opened.enter_context(pytest.MonkeyPatch.context()).setattr(
            "kvtide.tier.folder.takes_direct_io", lambda *_: False
        )
        disk = FaultyDisk(folder, chance, clock, limit_bytes, share, keeps_used=keeps_used)
        opened.callback(disk.close)
        opened.enter_context(disk.installed())
        made.append(disk)
    if "mooncake" in kind:
        opened.enter_context(pytest.MonkeyPatch.context()).setattr(
            "kvtide.tier.mooncake.time.sleep", clock.sleep
        )
        store = FaultyMooncake(chance, 1 << 18, fault_share)
        opened.callback(store.close)
        made.append(store)
    return made
