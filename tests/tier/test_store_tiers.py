"""A store opens its tiers in their order, or none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import UsageError
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from kvtide.tier import DiskTier, MooncakeSettings, Store
from kvtide.tier.store import default_disk_bytes
from tier.fake_mooncake import FakeStore

SETTINGS = MooncakeSettings("a:1")


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that whoever joins one gets."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    return store


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of 256 tokens of 128 bytes."""
    with closing(CPUDevice(lanes=1)) as device:
        geometry = GQA.bind(dtype="bfloat16", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        yield Pool.create(geometry, device, page_count=64)


def arena_of(pool: Pool) -> HostArena:
    """Two blocks, of 64 tokens each."""
    return HostArena(pool.device, limit_bytes=2 * 64 * 128, block_bytes=64 * 128)


def test_mooncake_takes_what_the_arena_has_no_room_for(pool: Pool, mooncake: FakeStore) -> None:
    """Each snapshot comes back with its own bytes, and nothing stays in the store."""
    with closing(Store(arena_of(pool), mooncake=SETTINGS)) as store:
        tide = Tide(pool, store.arena, spill=store.spill)
        snapshots = []
        for value in range(8):
            for buffer in pool.buffers:
                buffer.fill_(value)
            snapshots.append(tide.offload(range(64)))
        assert 6 <= len(mooncake.objects)
        for value, snapshot in enumerate(snapshots):
            tide.restore(snapshot, range(64, 128))
            assert {value} == set(b"".join(snapshot.chunks))
            tide.discard(snapshot)
    assert {} == mooncake.objects
    assert [True] == [client.is_closed for client in mooncake.clients]


def test_the_disk_comes_before_mooncake(pool: Pool, mooncake: FakeStore, tmp_path: Path) -> None:
    """A disk in the machine is nearer than another machine; what it refuses goes on."""
    for limit_bytes, in_mooncake in ((1 << 20, False), (0, True)):
        folder = tmp_path / str(limit_bytes)
        with closing(Store(arena_of(pool), folder, limit_bytes, mooncake=SETTINGS)) as store:
            tide = Tide(pool, store.arena, spill=store.spill)
            snapshots = [tide.offload(range(64)) for _ in range(4)]
            assert in_mooncake == bool(mooncake.objects)
            assert in_mooncake != bool(list(folder.glob("*/*.safetensors")))
            for snapshot in snapshots:
                tide.discard(snapshot)


def test_a_store_that_cannot_be_joined_leaves_the_folder_free(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's lock is given back, so that a second try can have it."""

    def refuse(settings: MooncakeSettings) -> None:
        raise UsageError("mooncake can't be loaded")

    monkeypatch.setattr("kvtide.tier.mooncake.connect", refuse)
    with pytest.raises(UsageError, match="can't be loaded"):
        Store(arena_of(pool), tmp_path, 1 << 20, mooncake=SETTINGS)
    DiskTier(tmp_path, limit_bytes=1 << 20).close()


def test_the_default_limit_of_a_disk_does_not_fall_with_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier starts left there may leave for others; files of somebody else may not."""
    disk_bytes = 1_000_000

    def usage(_: Path) -> SimpleNamespace:
        used_bytes = sum(path.lstat().st_size for path in tmp_path.rglob("*") if path.is_file())
        return SimpleNamespace(free=disk_bytes - used_bytes)

    monkeypatch.setattr("kvtide.tier.store.shutil.disk_usage", usage)
    kept = (tmp_path / "rank 0" / "ab", tmp_path / "damaged")
    names = (f"{'ab' * 16}.safetensors", f"{'ab' * 16}.{'cd' * 8}")
    for folder, name in zip(kept, names, strict=True):
        assert disk_bytes // 4 == default_disk_bytes(tmp_path)
        folder.mkdir(parents=True)
        (folder / name).write_bytes(bytes(100_000))
    assert disk_bytes // 4 == default_disk_bytes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    assert (disk_bytes - 100_000) // 4 == default_disk_bytes(tmp_path)
