"""The ranks of a host agree on how much memory they leave together, in whatever order they ask."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest

from kvtide.device import CPUDevice
from kvtide.errors import LayoutError
from kvtide.plugin import host_memory
from kvtide.plugin.host_memory import HostMemory
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import RankFailed
from kvtide.pool import Pool
from support.pools import small_geometry

GIB = 1 << 30
RANKS = range(4)


class Machine:
    """A host of 16 GiB on which each of four ranks' pools takes half a GiB once it is written."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.said: dict[int, Sequence[int]] = {}
        self.went_on_early = False
        self._all_said = threading.Barrier(len(RANKS))

    def free_bytes(self) -> int:
        """Returns what is free, and notes a rank that took its arena while others measure."""
        self.went_on_early |= any(name.startswith("arena") for name in self.taken)
        return 16 * GIB - sum(self.taken.values())

    def hear(self, rank: int, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Returns what all ranks said, once all have said it."""
        self.said[rank] = numbers
        self._all_said.wait(10)
        heard = [self.said[other] for other in RANKS]
        self._all_said.wait(10)
        return heard


class RanksOn(Ranks):
    """The ranks as one rank of the machine sees them."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()
        self._machine, self._rank = machine, rank

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Asks the other ranks."""
        return self._machine.hear(self._rank, numbers)


class RanksElsewhere(Ranks):
    """Two more ranks on other hosts."""

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Returns this rank's numbers, and the numbers of two ranks on other hosts."""
        return [numbers, [1, 4], [2, 1]]


def measure_on(
    machine: Machine, order: Sequence[int], touched: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[int, int]]:
    """Lets the ranks measure one after the other, and returns what each is told.

    The first `touched` ranks of `order` have written to their pools when they ask. A rank takes its
    arena when it has its answer.
    """
    monkeypatch.setattr(host_memory, "free_memory_bytes", machine.free_bytes)
    heard: dict[int, tuple[int, int]] = {}

    def run(rank: int, untouched_bytes: int) -> None:
        memory = HostMemory(None, len(RANKS), RanksOn(machine, rank))
        heard[rank] = memory.measure(untouched_bytes)
        machine.taken[f"arena {rank}"] = GIB

    threads = []
    for place, rank in enumerate(order):
        is_touched = place < touched
        if is_touched:
            machine.taken[f"pool {rank}"] = GIB // 2
        threads.append(threading.Thread(target=run, args=(rank, 0 if is_touched else GIB // 2)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return heard


@pytest.mark.parametrize("touched", range(5))
def test_ranks_agree_in_whatever_order_they_write_to_their_pools(
    monkeypatch: pytest.MonkeyPatch, touched: int
) -> None:
    """16 GiB minus four pools of half a GiB remain, whichever ranks have written to their pools."""
    for order in itertools.permutations(RANKS):
        machine = Machine()
        heard = measure_on(machine, order, touched, monkeypatch)
        left = [free - untouched for untouched, free in heard.values()]
        assert [14 * GIB] * len(RANKS) == left, order
        assert not machine.went_on_early


class RanksInStep(Ranks):
    """This rank and another that answers `other`; `asked` keeps the questions."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.other, self.asked = other, list[object]()

    def least(self, value: int) -> int:
        """See Ranks."""
        self.asked.append(value)
        return min(value, self.other)

    def gather(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """See Ranks."""
        self.asked.append("gather")
        return super().gather(numbers)


@pytest.mark.parametrize(("other", "limit_bytes"), [(GIB, 1 << 20), (1 << 19, 1 << 19), (0, 0)])
def test_an_arena_has_the_smallest_share_of_all_ranks(other: int, limit_bytes: int) -> None:
    """Four ranks share four MiB; a rank that has no room does not refuse."""
    ranks, device = RanksInStep(other), CPUDevice(lanes=1)
    pool = Pool.create(small_geometry(), device, page_count=2)
    arena = HostMemory(4 << 20, len(RANKS), ranks).arena_for(pool)
    assert (limit_bytes, ["gather", "gather", 1 << 20]) == (arena.limit_bytes, ranks.asked)
    device.close()


def test_a_refusal_reaches_all_ranks() -> None:
    """A rank that refuses answers as often as the others ask, or they would wait for ever."""
    refusing, asking, device = RanksInStep(GIB), RanksInStep(-1), CPUDevice(lanes=1)
    with (
        pytest.raises(LayoutError, match="no such pool"),
        HostMemory(None, 2, refusing).refusing_together(),
    ):
        raise LayoutError("no such pool")
    pool = Pool.create(small_geometry(), device, page_count=2)
    with pytest.raises(RankFailed, match="refused on another rank"):
        HostMemory(2 << 20, 2, asking).arena_for(pool)
    assert ["gather", "gather", -1] == refusing.asked
    assert ["gather", "gather", 1 << 20] == asking.asked
    device.close()


def test_ranks_of_other_hosts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer, as all ranks must, but their memory isn't this host's."""
    monkeypatch.setattr(host_memory, "_host_id", lambda: 1)
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 9)
    assert (3 + 4, 4) == HostMemory(None, 2, RanksElsewhere()).measure(3)


def test_ranks_that_cannot_be_asked_are_counted_like_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas of a server share the host, but have no group in common, so they can't ask.

    Each of them is taken to have written as much to its pool as this rank.
    """
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 9)
    assert (4 * 3, 9) == HostMemory(None, 4, Ranks()).measure(3)


def test_limit_of_all_ranks_holds_what_stands_beside_their_blocks() -> None:
    """A rank's arena has its part of the limit, and of that part a sixteenth isn't blocks."""
    device = CPUDevice(lanes=1)
    pool = Pool.create(small_geometry(), device, page_count=2)
    arena = HostMemory(256 << 20, 4, Ranks()).arena_for(pool)
    assert 64 << 20 == arena.limit_bytes
    assert 40 << 20 < arena.block_count * arena.block_bytes <= 60 << 20
    device.close()
