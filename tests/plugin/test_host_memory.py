"""How much memory the ranks of a host leave together: the same answer, whoever of them is first."""

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
    """16 GiB of which each of four ranks' pools takes half a GiB as soon as it is written."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.said: dict[int, Sequence[int]] = {}
        self.went_on_early = False
        self._all_said = threading.Barrier(len(RANKS))

    def free_bytes(self) -> int:
        """What is free now; a rank that took its arena while others still measure is noted."""
        self.went_on_early |= any(name.startswith("arena") for name in self.taken)
        return 16 * GIB - sum(self.taken.values())

    def hear(self, rank: int, numbers: Sequence[int]) -> list[Sequence[int]]:
        """What all ranks say, once they all have."""
        self.said[rank] = numbers
        self._all_said.wait(10)
        heard = [self.said[other] for other in RANKS]
        self._all_said.wait(10)
        return heard


class RanksOn(Ranks):
    """One rank of those on the machine."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()
        self._machine, self._rank = machine, rank

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Asks the other ranks."""
        return self._machine.hear(self._rank, numbers)


class RanksElsewhere(Ranks):
    """Two more ranks, on other hosts."""

    def gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """They answer whatever is asked."""
        return [numbers, [1, 4], [2, 1]]


def measure_on(
    machine: Machine, order: Sequence[int], touched: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[int, int]]:
    """What each rank hears: of those in `order`, one after the other, the first `touched` have
    written to their pools when they ask. Who has its answer takes an arena."""
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
    """16 GiB less four pools of half a GiB, in all orders and wherever the ranks have got to."""
    for order in itertools.permutations(RANKS):
        machine = Machine()
        heard = measure_on(machine, order, touched, monkeypatch)
        left = [free - untouched for untouched, free in heard.values()]
        assert [14 * GIB] * len(RANKS) == left, order
        assert not machine.went_on_early


class RanksInStep(Ranks):
    """This rank, and another one that answers with `other`; `asked` is what was asked."""

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
def test_an_arena_is_the_least_part_of_all_ranks(other: int, limit_bytes: int) -> None:
    """Four ranks have four MiB; a rank without room isn't one that refuses."""
    ranks, device = RanksInStep(other), CPUDevice(lanes=1)
    pool = Pool.create(small_geometry(), device, page_count=2)
    arena = HostMemory(4 << 20, len(RANKS), ranks).arena_for(pool)
    assert (limit_bytes, ["gather", "gather", 1 << 20]) == (arena.limit_bytes, ranks.asked)
    device.close()


def test_a_refusal_is_heard_by_all_ranks() -> None:
    """Who refuses answers as often as who asks for an arena; the others would wait for ever."""
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


def test_ranks_of_other_hosts_take_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer, as all must, and their memory is their own."""
    monkeypatch.setattr(host_memory, "_host_id", lambda: 1)
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 9)
    assert (3 + 4, 4) == HostMemory(None, 2, RanksElsewhere()).measure(3)


def test_ranks_that_take_no_part_count_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a server share the host, and have no group in common: nobody hears what they
    have written to."""
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 9)
    assert (4 * 3, 9) == HostMemory(None, 4, Ranks()).measure(3)
