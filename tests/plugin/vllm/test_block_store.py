"""A rank's blocks: off the device and back, through a disk, and what goes wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.arena import HostArena, Lease
from kvtide.device import CPUDevice, Job
from kvtide.plugin.vllm.block_store import BlockStore, Pairs
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.messages import BlockReport, Orders
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import DiskTier, Namespace, Tier
from kvtide.transfer.run import DeviceCopier, HostCopier

A, B, C = b"a\0", b"b\0", b"c\1"
BLOCKS, POISON = 6, 0x5A
THREADS = 4
"""How many blocks a store reads side by side."""


class Caches:
    """Two groups: two layers with padding behind each block, and one layer."""

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(0)
        wide = torch.randint(-128, 128, (2, BLOCKS, 40), dtype=torch.int8, generator=make)
        narrow = torch.randint(-128, 128, (BLOCKS, 24), dtype=torch.int8, generator=make)
        self.layers = [(wide[0], 32), (wide[1], 32), (narrow, 24)]
        self.device = CPUDevice(lanes=1)
        self.groups = [
            BlockGroup.adopt(number, layers, self.device)
            for number, layers in enumerate((self.layers[:2], self.layers[2:]))
        ]

    def bytes_of(self, group: int, block: int) -> list[bytes]:
        """The bytes of a block in each layer of its group, without padding."""
        layers = self.layers[:2] if group == 0 else self.layers[2:]
        return [tensor[block, :size].numpy().tobytes() for tensor, size in layers]

    def poison(self) -> None:
        """Overwrites all blocks, and the padding too."""
        for tensor, _ in self.layers:
            tensor.fill_(POISON)


@contextmanager
def opened(
    caches: Caches,
    tier: Tier | None = None,
    *,
    block_count: int = 8,
    deadline_s: float = 60,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[BlockStore]:
    """A store over the caches with room for `block_count` blocks."""
    arena = HostArena(caches.device, limit_bytes=64 * block_count, block_bytes=64)
    names = Namespace(model="m", weights="w", layout="l")
    store = BlockStore(
        caches.groups, lambda key: key[-1], arena, names, tier, deadline_s=deadline_s, clock=clock
    )
    yield store
    store.close()
    assert not arena.used_bytes
    caches.device.close()


def moved(store: BlockStore, job_id: int) -> tuple[bool, BlockReport]:
    """Whether a move went well, and what the store reports of it."""
    store.wait([job_id])
    (ended,) = store.take_ended()
    assert ended.job_id == job_id
    return ended.went_well, store.take_report()


def fetched(store: BlockStore, *keys: bytes) -> BlockReport:
    """What the store reports of a fetch, once it has ended."""
    store.follow(Orders(fetch=list(keys)))
    report = BlockReport()
    while len(report.fetched) + len(report.missing) < len(keys):
        report.add(store.take_report())
    return report


@contextmanager
def held(store: BlockStore) -> Iterator[None]:
    """Lets moves begin, and not end before the block does, as on an accelerator."""
    go, device = threading.Event(), store._groups[0].pool.device
    assert isinstance(device, CPUDevice)
    store._at_once = False
    device._queue.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def flip(store: BlockStore, key: bytes, byte: int) -> None:
    """Flips a bit of a block in host memory."""
    store._held[key].lease.blocks[0].bytes_view(64)[byte] ^= 1


def before_each_copy(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Does `work` right before each copy to the device, whoever does the copy."""
    for kind in (HostCopier, DeviceCopier):

        def scatter(copier: Any, *place: Any, copy: Any = kind.scatter) -> None:
            work()
            copy(copier, *place)

        monkeypatch.setattr(kind, "scatter", scatter)


SAVED: Sequence[Pairs] = [[(A, 1), (B, 2)], [(C, 3)]]
LOADED: Sequence[Pairs] = [[(A, 5), (B, 4)], [(C, 1)]]


class TestMoves:
    def test_give_blocks_of_all_groups_back_at_other_places(self) -> None:
        caches = Caches()
        expected = [caches.bytes_of(0, 1), caches.bytes_of(0, 2), caches.bytes_of(1, 3)]
        with opened(caches) as store:
            store.save(1, SAVED)
            assert moved(store, 1)[0]
            caches.poison()
            store.load(2, LOADED)
            assert moved(store, 2)[0]

        found = [caches.bytes_of(0, 5), caches.bytes_of(0, 4), caches.bytes_of(1, 1)]
        assert expected == found
        untouched = [caches.bytes_of(0, block) for block in (0, 1, 2, 3)]
        assert {bytes([POISON]) * 32} == {part for parts in untouched for part in parts}
        padding = {int(value) for tensor, size in caches.layers[:2] for value in tensor[5, size:]}
        assert {POISON} == padding

    @pytest.mark.parametrize("byte", [0, 31, 32, 63])
    def test_of_a_damaged_block_fail_and_tell_which_it_is(self, byte: int) -> None:
        caches = Caches()
        expected = caches.bytes_of(0, 1)
        with opened(caches) as store:
            store.save(1, [*SAVED[:1], []])
            moved(store, 1)
            flip(store, B, byte)
            caches.poison()
            store.load(2, [*LOADED[:1], []])
            went_well, report = moved(store, 2)
            store.load(3, [[(A, 5)], []])
            goes_well, _ = moved(store, 3)

        assert (False, {B}) == (went_well, report.lost)
        assert (1, 1) == (report.counts["damaged_blocks"], report.counts["failed_loads"])
        assert (True, expected) == (goes_well, caches.bytes_of(0, 5))

    def test_of_one_damaged_block_may_fail_twice(self) -> None:
        with opened(Caches()) as store:
            store.save(1, [[(A, 1), (B, 2)], []])
            store.take_ended()
            flip(store, A, 0)
            for job_id in (2, 3):
                store.load(job_id, [[(A, 5), (B, 4)], []])
            assert [False, False] == [ended.went_well for ended in store.take_ended()]
            assert {B} == store._held.keys()
            assert 1 == store.take_report().counts["damaged_blocks"]

    def test_of_a_block_that_isnt_here_fail_alone(self) -> None:
        with opened(Caches()) as store:
            store.load(1, [[(A, 1)], []])
            went_well, report = moved(store, 1)

        assert (False, {A}) == (went_well, report.lost)

    def test_without_room_save_the_first_blocks(self) -> None:
        with opened(Caches(), block_count=1) as store:
            store.save(1, [*SAVED[:1], []])
            _, report = moved(store, 1)

        assert {B} == report.lost
        assert (1, 1) == (report.counts["saved_blocks"], report.counts["unsaved_blocks"])

    def test_of_block_zero_are_refused(self) -> None:
        """vLLM's block 0 belongs to nobody, so a move of it is a mistake."""
        with opened(Caches()) as store:
            store.save(1, [[(A, 0)], []])
            went_well, report = moved(store, 1)

        assert (False, {A}) == (went_well, report.lost)


class TestLoads:
    """vLLM gives a block of a load to nobody unless the load ended well."""

    @pytest.fixture(autouse=True)
    def spans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A block has a checksum for each layer, as blocks of a real model have several."""
        monkeypatch.setattr("kvtide.form.SPAN_BYTES", 1)

    @pytest.mark.parametrize("byte", [0, 31, 32, 63])
    @pytest.mark.parametrize("key", [A, B])
    def test_check_all_layers_of_all_blocks(self, key: bytes, byte: int) -> None:
        with opened(Caches()) as store:
            store.save(1, SAVED)
            moved(store, 1)
            assert 2 == len(store._held[key].seal.spans)
            flip(store, key, byte)
            store.load(2, LOADED)
            went_well, report = moved(store, 2)

            assert (False, {key}) == (went_well, report.lost)
            assert {A, B, C} - {key} == store._held.keys()

    @pytest.mark.parametrize("byte", [0, 31, 32, 63])
    def test_check_a_block_after_its_copy(self, byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise a bit that flips in between would be on the device, and nobody would know."""
        left = [byte]
        with opened(Caches()) as store:
            store.save(1, SAVED)
            moved(store, 1)
            before_each_copy(monkeypatch, lambda: flip(store, A, left.pop()) if left else None)
            store.load(2, LOADED)
            went_well, report = moved(store, 2)

        assert (False, {A}) == (went_well, report.lost)

    def test_drop_all_damaged_blocks_at_once(self) -> None:
        """Otherwise each of them would cost a request of its own."""
        caches = Caches()
        expected = caches.bytes_of(1, 3)
        with opened(caches) as store:
            store.save(1, SAVED)
            moved(store, 1)
            flip(store, A, 40)
            flip(store, B, 0)
            caches.poison()
            store.load(2, LOADED)
            went_well, report = moved(store, 2)
            store.load(3, [[], LOADED[1]])

            assert (False, {A, B}, 2) == (went_well, report.lost, report.counts["damaged_blocks"])
            assert moved(store, 3)[0]
        assert expected == caches.bytes_of(1, 1)

    def test_that_fail_without_damage_drop_their_blocks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is whole here, and can't be loaded, would fail the next request, too."""

        def fail() -> None:
            raise OSError("the device is gone")

        with opened(Caches()) as store:
            store.save(1, SAVED)
            moved(store, 1)
            before_each_copy(monkeypatch, fail)
            store.load(2, [*LOADED[:1], []])
            went_well, report = moved(store, 2)

            assert (False, {A, B}, 0) == (went_well, report.lost, report.counts["damaged_blocks"])
            assert {C} == store._held.keys()


class TestDisk:
    def test_has_the_blocks_for_the_next_store(self, tmp_path: Path) -> None:
        caches, tier = Caches(), DiskTier(tmp_path, limit_bytes=1 << 20)
        expected = caches.bytes_of(0, 2)
        with opened(caches, tier) as store:
            store.save(1, SAVED)
            moved(store, 1)
        caches = Caches()
        caches.poison()
        with opened(caches, tier) as store:
            report = fetched(store, A, B, C)
            store.load(1, LOADED)
            assert moved(store, 1)[0]
        tier.close()

        assert {A, B, C} == {*report.fetched}
        assert expected == caches.bytes_of(0, 4)

    def test_gives_no_damaged_block(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        with opened(Caches(), tier) as store:
            store.save(1, [[(A, 1)], []])
            moved(store, 1)
        (path,) = tmp_path.rglob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-4096] ^= 1
        path.write_bytes(content)
        with opened(Caches(), tier) as store:
            report = fetched(store, A)
            again = fetched(store, A)
        tier.close()

        assert ({A}, 1) == (report.missing, report.counts["damaged_blocks"])
        assert ({A}, 0) == (again.missing, again.counts["damaged_blocks"])

    def test_has_its_writes_noted_by_the_thread_that_moves_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lease forgets a move, and gives its block away, if two threads note moves at once."""
        noted: list[str] = []
        use = Lease.use

        def note(lease: Lease, move: Job[Any]) -> None:
            noted.append(threading.current_thread().name)
            use(lease, move)

        monkeypatch.setattr(Lease, "use", note)
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        with opened(Caches(), tier) as store:
            store.save(1, SAVED)
            moved(store, 1)
        assert 3 == tier.stats.snapshots
        tier.close()

        assert [threading.current_thread().name] * 6 == noted

    def test_isnt_asked_again_for_what_was_saved_before_a_reset(self, tmp_path: Path) -> None:
        """vLLM resets its caches when weights have changed."""
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        with opened(Caches(), tier) as store:
            store.save(1, [[(A, 1)], []])
            moved(store, 1)
        with opened(Caches(), tier) as store:
            before = fetched(store, A)
            store.follow(Orders(reset_number=1))
            after = fetched(store, A)
        tier.close()

        assert ({A}, {A}) == ({*before.fetched}, after.missing)


class TestSavesThatAreNotValid:
    """The files of an adapter may have changed before vLLM read them."""

    def test_are_neither_kept_nor_written(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        with opened(Caches(), tier) as store:
            with held(store):
                store.save(1, SAVED, is_valid=lambda: False)
            went_well, report = moved(store, 1)

        keys = {key for pairs in SAVED for key, _ in pairs}
        assert (False, keys) == (went_well, report.lost)
        assert len(keys) == report.counts["unsaved_blocks"]
        assert (0, 0, {}) == (tier.stats.snapshots, store._arena.used_bytes, store._held)
        tier.close()


class TestReset:
    """vLLM resets its caches when weights have changed."""

    def test_keeps_nothing_of_a_save_under_way(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        caches = Caches()
        with opened(caches, tier) as store:
            with held(store):
                store.save(1, SAVED)
                store.follow(Orders(reset_number=1))
            moved(store, 1)
            assert not store._held
            assert not store._arena.used_bytes
        assert 0 == tier.stats.snapshots
        tier.close()

    def test_keeps_nothing_of_a_save_that_was_ordered_before(self, tmp_path: Path) -> None:
        """vLLM tells of a save one step after it ordered it."""
        tier = DiskTier(tmp_path, limit_bytes=1 << 20)
        with opened(Caches(), tier) as store:
            store.follow(Orders(reset_number=1))
            store.save(1, SAVED, reset_number=0)
            store.save(2, [[], [(C, 3)]], reset_number=1)
            store.wait([1, 2])
            assert [1, 2] == [move.job_id for move in store.take_ended()]
            assert {C} == {*store._held}
        assert 1 == tier.stats.snapshots
        tier.close()

    def test_makes_a_load_under_way_fail(self) -> None:
        with opened(Caches()) as store:
            store.save(1, SAVED)
            moved(store, 1)
            with held(store):
                store.load(2, LOADED)
                store.follow(Orders(reset_number=1))
            went_well, report = moved(store, 2)

        assert (False, 1) == (went_well, report.counts["failed_loads"])


class HungTier(Tier):
    """A tier whose reads hang until `let_go` lets them fail."""

    name = "hung"

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._begun = self._let_go = 0

    def contains(self, key: str) -> bool:
        return True

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """Takes anything, and keeps nothing."""

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        with self._change:
            number, self._begun = self._begun, self._begun + 1
            self._change.notify_all()
            self._change.wait_for(lambda: number < self._let_go)
        raise OSError("it hung")

    def remove(self, key: str) -> None:
        """Has nothing."""

    def wait_for(self, count: int) -> None:
        """Blocks until so many reads have begun."""
        with self._change:
            self._change.wait_for(lambda: self._begun >= count)

    def let_go(self, count: int) -> None:
        """Lets the first so many reads fail."""
        with self._change:
            self._let_go = count
            self._change.notify_all()


class LateTier(HungTier):
    """A disk whose reads take the room they are given, and hang before they write into it."""

    def __init__(self, disk: DiskTier) -> None:
        super().__init__()
        self._disk = disk
        self.has_room, self.goes_on = threading.Event(), threading.Event()

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""

        def late_room(seal: Seal) -> Sequence[memoryview]:
            room = make_room(seal)
            self.has_room.set()
            self.goes_on.wait(60)
            return room

        return self._disk.get(key, late_room)


class HungWrites(HungTier):
    """A tier whose writes hang until an event."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        self.has_begun.set()
        self.goes_on.wait(60)


class TestHungTier:
    def test_costs_a_fetch_its_deadline_and_the_next_nothing(self) -> None:
        tier, now = HungTier(), [0.0]
        with opened(Caches(), tier, clock=lambda: now[0]) as store:
            store.follow(Orders(fetch=[A]))
            tier.wait_for(1)
            now[0] = 61
            assert {A} == store.take_report().missing
            store.follow(Orders(fetch=[B]))
            assert {B} == store.take_report().missing
            tier.let_go(1)

    def test_ends_fetches_that_wait_for_a_thread_with_the_first_that_is_late(self) -> None:
        tier, now = HungTier(), [0.0]
        keys = [bytes([number, 0]) for number in range(THREADS + 2)]
        with opened(Caches(), tier, clock=lambda: now[0]) as store:
            store.follow(Orders(fetch=keys))
            tier.wait_for(THREADS)
            now[0] = 61
            assert {*keys} == store.take_report().missing
            tier.let_go(THREADS)

    def test_hangs_as_well_where_nobody_wants_its_blocks_any_more(self) -> None:
        """Its reads keep all threads, so that one that is wanted never begins."""
        tier, now = HungTier(), [0.0]
        keys = [bytes([number, 0]) for number in range(THREADS)]
        with opened(Caches(), tier, clock=lambda: now[0]) as store:
            store.follow(Orders(fetch=keys))
            tier.wait_for(THREADS)
            store.follow(Orders(forget=keys))
            store.follow(Orders(fetch=[b"z\0"]))
            assert not store.take_report().missing
            now[0] = 61
            assert {b"z\0"} == store.take_report().missing
            store.follow(Orders(fetch=[b"y\0"]))
            assert {b"y\0"} == store.take_report().missing
            tier.let_go(THREADS)

    def test_is_not_what_a_fetch_that_waits_for_a_thread_says(self) -> None:
        """Many blocks take longer than one may."""
        tier, now = HungTier(), [0.0]
        keys = [bytes([number, 0]) for number in range(THREADS + 1)]
        with opened(Caches(), tier, clock=lambda: now[0]) as store:
            store.follow(Orders(fetch=keys))
            tier.wait_for(THREADS)
            now[0] = 40
            tier.let_go(THREADS)
            tier.wait_for(THREADS + 1)
            missing: set[bytes] = set()
            while len(missing) < THREADS:
                missing |= store.take_report().missing
            now[0] = 80
            assert not store.take_report().missing
            tier.let_go(THREADS + 1)


class TestLateRead:
    """It goes on to write, and kvtide would seal its bytes as another block's."""

    @pytest.mark.parametrize("is_withdrawn", [False, True])
    def test_keeps_its_memory_until_it_has_ended(self, is_withdrawn: bool, tmp_path: Path) -> None:
        disk, now = DiskTier(tmp_path, limit_bytes=1 << 20), [0.0]
        with opened(Caches(), disk) as store:
            store.save(1, [[(A, 1)], []])
            moved(store, 1)
        tier = LateTier(disk)
        with opened(Caches(), tier, block_count=1, clock=lambda: now[0]) as store:
            store.follow(Orders(fetch=[A]))
            tier.has_room.wait(60)
            if is_withdrawn:
                store.follow(Orders(forget=[A]))
            else:
                now[0] = 61
                assert {A} == store.take_report().missing
            store.save(1, [[(B, 2)], []])
            _, report = moved(store, 1)
            assert ({B}, 64) == (report.lost, store._arena.used_bytes)
            tier.goes_on.set()
            until = time.monotonic() + 60
            while store._arena.used_bytes:
                assert time.monotonic() < until, "the read never ends"
            store.save(2, [[(B, 2)], []])
            assert 1 == moved(store, 2)[1].counts["saved_blocks"]
        disk.close()


class TestWriter:
    def test_gives_the_memory_of_what_it_wont_write_back(self) -> None:
        """One write hangs, the others wait for a thread."""
        tier = HungWrites()
        with opened(Caches(), tier, block_count=3) as store:
            store.save(1, [[(A, 1), (B, 2)], []])
            moved(store, 1)
            tier.has_begun.wait(60)
            store.follow(Orders(forget=[A, B]))
            counts = store.take_report().counts
            used_bytes = store._arena.used_bytes
            tier.goes_on.set()

        assert (1, 64) == (counts["unwritten_blocks"], used_bytes)


class TestWaitForFetches:
    def test_returns_when_all_have_ended(self) -> None:
        tier = HungTier()
        with opened(Caches(), tier) as store:
            store.follow(Orders(fetch=[A, B]))
            tier.let_go(2)
            store.wait_for_fetches(60)
            assert {A, B} == store.take_report().missing

    def test_returns_at_last_while_one_hangs(self) -> None:
        tier = HungTier()
        with opened(Caches(), tier) as store:
            store.follow(Orders(fetch=[A]))
            store.wait_for_fetches(0.01)
            assert not store.take_report()
            tier.let_go(1)


@pytest.mark.parametrize("width", [7, 32])
def test_blocks_of_any_width_are_adopted(width: int) -> None:
    """Padding is no KV, whatever follows it."""
    device = CPUDevice(lanes=1)
    group = BlockGroup.adopt(0, [(torch.zeros(3, 40, dtype=torch.int8), width)], device)

    assert width == group.block_bytes
    device.close()
