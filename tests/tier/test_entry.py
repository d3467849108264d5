from __future__ import annotations

import random
from contextlib import closing

import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.seal import Seal, Span
from kvtide.snapshot import Snapshot
from kvtide.tier.entry import SpillEntries, SpillEntry, State

NEAR = (State.HERE, State.WRITING, State.WRITTEN, State.READING)
NEXT = {
    State.HERE: (State.WRITING,),
    State.WRITING: (State.WRITTEN, State.HERE),
    State.WRITTEN: (State.BELOW,),
    State.BELOW: (State.READING,),
    State.READING: (State.WRITTEN, State.LOST),
    State.LOST: (),
}


class Model:
    """The same books, as plainly as possible: a list, the least recently used first."""

    def __init__(self) -> None:
        self.entries: list[SpillEntry] = []

    def near(self) -> list[SpillEntry]:
        return [entry for entry in self.entries if entry.state in NEAR]

    def blocks(self, *states: State) -> list[int]:
        return [entry.block_count for entry in self.entries if entry.state in states]

    def use(self, entry: SpillEntry) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)


@pytest.mark.parametrize("seed", range(5))
def test_books_are_those_of_a_plain_list(seed: int) -> None:
    """After each of many changes: the order of use, what is near, and the counts of blocks."""
    chance, books, model = random.Random(seed), SpillEntries(), Model()
    with closing(CPUDevice(lanes=1)) as device:
        arena = HostArena(device, limit_bytes=1 << 16, block_bytes=64)
        for number in range(600):
            act = chance.choice(("add", "change", "change", "use", "pop"))
            if act == "add" or not model.entries:
                spans = tuple(Span(chunk, 0, 8, 0) for chunk in range(chance.randrange(4)))
                lease = arena.lease(0)
                lease.release()
                seal = Seal('{"groups":[]}', str(number), 1, (), (), 8, spans)
                entry = SpillEntry(Snapshot(seal, lease), str(number), chance.choice([*NEXT]))
                books.add(entry)
                model.entries.append(entry)
            else:
                entry = chance.choice(model.entries)
                if act == "use":
                    assert entry is books.used(entry.snapshot)
                    if entry.state in NEAR:
                        model.use(entry)
                elif act == "pop":
                    model.entries.remove(entry)
                    assert entry is books.pop(entry.snapshot)
                    assert books.pop(entry.snapshot) is None
                elif NEXT[entry.state]:
                    was_near = entry.state in NEAR
                    books.change(entry, chance.choice(NEXT[entry.state]))
                    if entry.state in NEAR and not was_near:
                        model.use(entry)
            assert model.near() == [*books.near.values()]
            assert len(model.entries) == len(books)
            unwritten = sum(model.blocks(State.HERE, State.WRITING))
            below = max(model.blocks(State.BELOW), default=0)
            assert (unwritten, below) == (books.unwritten_blocks, books.largest_below)
            kept = model.blocks(State.WRITTEN, State.BELOW, State.READING)
            assert len(kept) == books.kept_count()
            assert books.have_way_back(below + unwritten)
            assert not unwritten or not books.have_way_back(below + unwritten - 1)
