"""The disk below vLLM's blocks: a folder for each rank, and for each engine that uses it."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtide.device.pages import LargePages
from kvtide.errors import UsageError
from kvtide.plugin.vllm.block_store import writes_at_once
from kvtide.plugin.vllm.messages import Orders
from kvtide.plugin.vllm.open_store import OpenStore, open_device_of, open_store
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.plugin.vllm.tiers_below import open_disk
from kvtide.seal import Seal
from kvtide.tier import DiskTier
from support.fake_vllm import config_for
from support.simulated import simulated

SETTINGS = OffloadSettings(host_memory_bytes=1 << 20)


def test_ranks_and_engines_have_folders_of_their_own(tmp_path: Path) -> None:
    """A second engine on the same folder doesn't fail; the next one after both takes the first."""
    settings = OffloadSettings(disk_dir=tmp_path, disk_memory_bytes=1 << 20)
    tiers = [open_disk(settings, rank, 2) for rank in (0, 1, 0)]
    limits = [tier.stats.limit_bytes for tier in tiers if tier is not None]
    for tier in tiers:
        assert tier is not None
        tier.close()

    assert [1 << 19] * 3 == limits
    found = sorted(path.name for path in (tmp_path / "vllm").iterdir())
    assert ["0-of-2-0", "0-of-2-1", "1-of-2-0"] == found
    again = open_disk(settings, 0, 2)
    assert again is not None
    with closing(again):
        assert 3 == len(list((tmp_path / "vllm").iterdir()))


def test_a_folder_that_cant_be_made_is_named(tmp_path: Path) -> None:
    """An operator's mistake ends the start, and not the first save."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="disk_dir"):
        open_disk(OffloadSettings(disk_dir=tmp_path / "file"), 0, 1)


def test_the_device_is_the_one_that_the_caches_are_on() -> None:
    """A rank's caches may be on the second one, whichever is the thread's current device."""
    with simulated("lazy") as name:
        cache = torch.zeros(2, 8, dtype=torch.int8, device=f"{name}:1")
        caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=cache)])
        with closing(open_device_of(caches)) as device:
            assert cache.device == device.torch_device
        torch.accelerator.synchronize(cache.device)


def test_host_memory_has_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has them: a disk reads into them almost three times as fast."""
    given: list[int] = []
    monkeypatch.setattr(LargePages, "give_to", lambda self, pages, memory: given.append(len(pages)))
    caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=torch.zeros(2, 8, dtype=torch.int8))])
    with closing(open_device_of(caches)) as device:
        device.allocate_host(4 << 20)
    assert [4 << 20] == given


def opened_for(
    layer_names: list[str],
    folder: Path,
    *,
    block_count: int = 4,
    settings: OffloadSettings = SETTINGS,
) -> OpenStore:
    """The store of a rank with two layers of one width."""
    shape = (block_count, 64)
    tensors = [SimpleNamespace(tensor=torch.zeros(shape, dtype=torch.int8)) for _ in range(2)]
    refs = [[SimpleNamespace(tensor_idx=number, page_size_bytes=64) for number in range(2)]]
    caches = SimpleNamespace(tensors=tensors, group_data_refs=refs)
    config = SimpleNamespace(
        parallel=SimpleNamespace(rank=0, world_size=1),
        groups=[SimpleNamespace(group_id=0, layer_names=layer_names)],
    )
    return open_store(config_for(folder), config, settings, caches, object())


def test_the_first_memory_is_taken_at_the_start(tmp_path: Path) -> None:
    """Otherwise the first request that is saved or loaded would wait for the system."""
    store = opened_for(["layers.0", "layers.1"], tmp_path)
    arena = store.blocks._arena
    assert (0, True) == (arena.used_bytes, arena.reserved_bytes > 0)
    store.close()


def test_blocks_that_are_being_written_leave_room_for_as_many_as_were_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They left, so the scheduler gives their room to others; but a disk still reads them."""
    has_begun, goes_on = threading.Semaphore(0), threading.Event()

    def hang(tier: DiskTier, key: str, seal: Seal, chunks: object) -> None:
        has_begun.release()
        goes_on.wait(60)

    monkeypatch.setattr(DiskTier, "put", hang)
    settings = OffloadSettings(64 << 10, tmp_path / "kv", disk_memory_bytes=1 << 20, weights="w")
    store = opened_for(["layers.0", "layers.1"], tmp_path, block_count=600, settings=settings)
    count, blocks = store.start.block_count, store.blocks
    keys = [b"%4d\0\0\0\0" % number for number in range(2 * count)]
    for job_id, part in enumerate((keys[:count], keys[count:])):
        blocks.save(job_id, [[(key, number + 1) for number, key in enumerate(part)]])
        blocks.take_ended()
        for _ in range(writes_at_once(blocks._arena) if not job_id else 0):
            assert has_begun.acquire(timeout=60)
        blocks.follow(Orders(forget=part))
    report = blocks.take_report()
    goes_on.set()
    store.close()

    assert (2 * count, 0) == (report.counts["saved_blocks"], report.counts["unsaved_blocks"])


def test_layers_of_one_width_are_told_apart_by_their_names(tmp_path: Path) -> None:
    """Their order within a block follows from their names alone."""
    names = (["layers.0", "layers.1"], ["layers.1", "layers.0"], ["layers.0", "layers.1"])
    found = []
    for given in names:
        store = opened_for(given, tmp_path)
        found.append(store.namespace)
        store.close()

    assert found[0] == found[2] != found[1]
