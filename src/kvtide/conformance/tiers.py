"""TierTests: what a tier must pass (kvtide.tier.base.Tier is the contract)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier.base import Tier

_PAGES = 64
_PAGE_SIZE = 4
_KEYS = (
    *("", "a", "A", "../a", "/etc/passwd", "a\0b", "a\nb", "é", "*", "%s", "a" * 5000, "con", "."),
    *("a/b", "a:b", '{"a": 1}', "\ud800", " a", "a "),
)


class TierTests(ABC):
    """Inherit this as `class TestMyTier(TierTests)` and give it three methods.

    A tier is made for each test. It must have room for at least 4 MiB. Where damage to a store of
    other processes takes too long, run the class twice: on a fake of the store with all bytes, and
    on the store itself with a larger `damage_step`.
    """

    damage_step = 1
    """Every how many bytes the store is damaged."""

    @abstractmethod
    def make_tier(self) -> Tier:
        """An empty tier."""

    @abstractmethod
    def stored_bytes(self, tier: Tier, key: str) -> int:
        """How many bytes the store has for a key: all that it needs to give the snapshot back."""

    @abstractmethod
    def set_stored(self, tier: Tier, key: str, place: int, flip: int) -> None:
        """Changes what the store has for a key, as a bad disk would.

        Byte `place` is combined with `flip` by XOR; with a `flip` of 0 the bytes from `place` on
        are cut off.
        """

    def close_tier(self, tier: Tier) -> None:
        """Frees what the tier holds after a test. Override it if your tier holds something."""
        del tier

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A tier from `make_tier`."""
        tier = self.make_tier()
        yield tier
        self.close_tier(tier)

    @pytest.fixture
    def tide(self) -> Iterator[Tide]:
        """A pool of random bytes, and an arena whose blocks hold a fourth of its tokens."""
        with closing(CPUDevice(lanes=1)) as device:
            geometry = GQA.bind(
                dtype="bfloat16", token=_PAGE_SIZE, layer=2, head=2, head_dim=8, v_head_dim=8
            )
            pool = Pool.create(geometry, device, page_count=_PAGES)
            _scramble(pool, 1)
            block_bytes = _PAGES * _PAGE_SIZE // 4 * geometry.token_bytes
            yield Tide(pool, HostArena(device, limit_bytes=1 << 20, block_bytes=block_bytes))

    # ---- hits --------------------------------------------------------------------------

    @pytest.mark.parametrize("count", [0, 1, 7, 64, 65, 200])
    def test_snapshot_comes_back_byte_for_byte(self, tier: Tier, tide: Tide, count: int) -> None:
        """Snapshots of any length come back, and restore the bytes that were saved."""
        slots = list(range(3, 3 + count))
        snapshot = tide.offload(slots, key="request")
        chunks = [bytes(chunk) for chunk in snapshot.chunks]
        tier.save("a", snapshot)
        seal = snapshot.seal
        tide.discard(snapshot)
        with closing(_Loaded(tier, "a", tide)) as loaded:
            assert chunks == [bytes(chunk) for chunk in loaded.snapshot.chunks]
            assert seal == loaded.snapshot.seal
            _scramble(tide.pool, 2)
            tide.restore(loaded.snapshot, slots, key="request")
            again = tide.offload(slots)
            assert chunks == [bytes(chunk) for chunk in again.chunks]
            tide.discard(again)

    def test_snapshot_can_be_read_again_and_again(self, tier: Tier, tide: Tide) -> None:
        """A read doesn't use a snapshot up."""
        chunks = _save(tier, tide, "a")
        for _ in range(3):
            assert chunks == _load(tier, tide, "a")

    @pytest.mark.parametrize("key", _KEYS, ids=lambda key: repr(key)[:20])
    def test_any_text_is_a_key(self, tier: Tier, tide: Tide, key: str) -> None:
        """A key with signs that mean something to a file system or a protocol is only a key."""
        chunks = _save(tier, tide, key)
        assert tier.contains(key)
        assert [False, True] == tier.contains_each([f"no {key}", key])
        assert chunks == _load(tier, tide, key)

    def test_keys_are_independent(self, tier: Tier, tide: Tide) -> None:
        """Each of many keys gives its bytes, also after every second one was removed."""
        saved: dict[str, list[bytes]] = {}
        for key in _KEYS:
            _scramble(tide.pool, len(saved))
            saved[key] = _save(tier, tide, key)
        for key in _KEYS[::2]:
            tier.remove(key)
        for number, key in enumerate(_KEYS):
            if number % 2:
                assert saved[key] == _load(tier, tide, key)
            else:
                _assert_miss(tier, tide, key)

    def test_later_put_replaces_the_earlier(self, tier: Tier, tide: Tide) -> None:
        """A key has the snapshot that was put last, be it longer or shorter."""
        for count in (40, 200, 8):
            _scramble(tide.pool, count)
            chunks = _save(tier, tide, "a", count)
            assert chunks == _load(tier, tide, "a")

    def test_put_keeps_a_copy(self, tier: Tier, tide: Tide) -> None:
        """The memory of a snapshot that was put may be used for another one."""
        chunks = _save(tier, tide, "a")
        _scramble(tide.pool, 3)
        other = tide.offload(range(200), key="b")
        assert chunks == _load(tier, tide, "a")
        tide.discard(other)

    def test_many_threads_may_call_it(self, tier: Tier, tide: Tide) -> None:
        """Calls side by side, of equal and of different keys, give each key its bytes."""
        snapshots: list[Snapshot] = []
        for number in range(4):
            _scramble(tide.pool, number)
            snapshots.append(tide.offload(range(8 * number, 8 * number + 40), key=str(number)))
        contents = [[bytes(chunk) for chunk in snapshot.chunks] for snapshot in snapshots]

        def go(turn: int) -> None:
            number = turn % len(snapshots)
            tier.save(str(number), snapshots[number])
            rooms: list[bytearray] = []

            def make_room(seal: Seal) -> list[memoryview]:
                rooms[:] = [bytearray(size_bytes) for size_bytes in seal.used_bytes]
                return [memoryview(room) for room in rooms]

            tier.get(str(number), make_room)
            assert contents[number] == rooms

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(go, turn) for turn in range(40)]:
                done.result()
        for snapshot in snapshots:
            tide.discard(snapshot)

    # ---- misses ------------------------------------------------------------------------

    def test_unknown_key_is_a_miss(self, tier: Tier, tide: Tide) -> None:
        """A key that was never put isn't there, and asks for no room."""
        _assert_miss(tier, tide, "a")

    def test_removed_key_is_a_miss(self, tier: Tier, tide: Tide) -> None:
        """A key can be removed twice, and put again."""
        _save(tier, tide, "a")
        for _ in range(2):
            tier.remove("a")
            _assert_miss(tier, tide, "a")
        chunks = _save(tier, tide, "a", 12)
        assert chunks == _load(tier, tide, "a")

    def test_no_room_is_no_loss(self, tier: Tier, tide: Tide) -> None:
        """An error of `make_room` comes through as it is, and the snapshot stays."""
        chunks = _save(tier, tide, "a")
        small = HostArena(tide.pool.device, limit_bytes=0, block_bytes=tide.arena.block_bytes)
        with pytest.raises(ArenaFull):
            tier.load("a", small)
        assert chunks == _load(tier, tide, "a")

    # ---- damage ------------------------------------------------------------------------

    def test_every_flipped_byte_is_found(self, tier: Tier, tide: Tide) -> None:
        """Wherever a bit of the store flips, a read gives the right bytes or an error."""
        chunks = _save(tier, tide, "a", 9)
        size_bytes = self.stored_bytes(tier, "a")
        assert size_bytes >= sum(map(len, chunks))
        found = 0
        for place in range(0, size_bytes, self.damage_step):
            self.set_stored(tier, "a", place, 1 << place % 8)
            found += self._reads_are_right(tier, tide, chunks)
            assert chunks == _save(tier, tide, "a", 9)
        assert found >= sum(map(len, chunks)) // self.damage_step

    def test_every_length_is_found(self, tier: Tier, tide: Tide) -> None:
        """Wherever the store is cut off, a read gives the right bytes or an error."""
        chunks = _save(tier, tide, "a", 9)
        size_bytes = self.stored_bytes(tier, "a")
        found = 0
        for place in range(0, size_bytes, self.damage_step):
            self.set_stored(tier, "a", place, 0)
            found += self._reads_are_right(tier, tide, chunks)
            assert chunks == _save(tier, tide, "a", 9)
        assert found >= sum(map(len, chunks)) // self.damage_step

    def _reads_are_right(self, tier: Tier, tide: Tide, chunks: list[bytes]) -> bool:
        """Whether the damage was found. A damaged snapshot is never tried again."""
        try:
            assert chunks == _load(tier, tide, "a")
            return False
        except (SnapshotDamaged, SnapshotMiss):
            _assert_miss(tier, tide, "a")
            return True
        finally:
            assert 0 == tide.arena.used_bytes


class _Loaded:
    """A snapshot from a tier, discarded at the end."""

    def __init__(self, tier: Tier, key: str, tide: Tide) -> None:
        self._tide = tide
        self.snapshot = tier.load(key, tide.arena)

    def close(self) -> None:
        self._tide.discard(self.snapshot)


def _scramble(pool: Pool, seed: int) -> None:
    """Sets all bytes of a pool to random ones."""
    random = torch.Generator().manual_seed(seed)
    for buffer in pool.buffers:
        buffer.copy_(torch.randint(256, buffer.shape, generator=random, dtype=torch.uint8))


def _save(tier: Tier, tide: Tide, key: str, count: int = 40) -> list[bytes]:
    """Puts a snapshot of the first slots; gives its bytes. Nothing is left in the arena."""
    snapshot = tide.offload(range(count))
    try:
        tier.save(key, snapshot)
        return [bytes(chunk) for chunk in snapshot.chunks]
    finally:
        tide.discard(snapshot)


def _load(tier: Tier, tide: Tide, key: str) -> list[bytes]:
    """The bytes that the tier has for a key. Nothing is left in the arena."""
    with closing(_Loaded(tier, key, tide)) as loaded:
        return [bytes(chunk) for chunk in loaded.snapshot.chunks]


def _assert_miss(tier: Tier, tide: Tide, key: str) -> None:
    assert not tier.contains(key)
    with pytest.raises(SnapshotMiss):
        _load(tier, tide, key)
