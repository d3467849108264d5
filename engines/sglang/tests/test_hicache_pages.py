"""Pages of all kinds of host pools go to a disk and come back byte for byte, in all layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_case import CASES, POOLS, buffers, config, fill, names, page_bytes, rows_of, storage
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

COUNT = 3


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_pages_come_back_at_other_places(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the pages that were asked for change, and they get every byte that was kept."""
    pool, keys = POOLS[name](layout), names(COUNT)
    store = storage(monkeypatch, config(tmp_path), {"kv": pool})
    fill(pool)
    kept = [page_bytes(pool, page) for page in (1, 4, 2)]
    assert [True] * COUNT == store.batch_set_v1(keys, rows_of(pool, (1, 4, 2)))
    fill(pool, seed=1)
    expected = [buffer.clone() for buffer in buffers(pool)]
    others = [page_bytes(pool, page) for page in (0, 1, 2, 4, 7)]

    assert [True] * COUNT == store.batch_get_v1(keys, rows_of(pool, (3, 5, 6)))
    assert all(
        torch.equal(before, page_bytes(pool, page))
        for before, page in zip(kept, (3, 5, 6), strict=True)
    )
    assert all(
        torch.equal(before, page_bytes(pool, page))
        for before, page in zip(others, (0, 1, 2, 4, 7), strict=True)
    )
    changed = sum(
        int((before != after).sum()) for before, after in zip(expected, buffers(pool), strict=True)
    )
    assert 0 < changed <= sum(part.numel() for part in kept), "nothing outside of the pages"
    store.close()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_flat_pages_come_back(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without interface_v1 SGLang copies pages to tensors and back itself."""
    pool, keys = POOLS[name](layout), names(COUNT)
    store = storage(monkeypatch, config(tmp_path, interface_v1=None), {"kv": pool})
    fill(pool)
    kept = [pool.get_data_page(page * pool.page_size) for page in range(COUNT)]
    copies = [tensor.clone() for tensor in kept]
    assert store.batch_set(keys, kept)
    targets = [pool.get_dummy_flat_data_page() for _ in keys]
    found = store.batch_get(keys, targets)
    assert found is not None
    assert all(
        target is tensor and torch.equal(before.view(torch.uint8), target.view(torch.uint8))
        for before, target, tensor in zip(copies, targets, found, strict=True)
    )
    assert COUNT == store.batch_exists([*keys, *names(1, chain=9)])
    store.close()


def sidecars(layout: str) -> dict[str, Any]:
    """Makes the pools of a server with windows, index keys and recurrent state."""
    return {
        "kv": POOLS["kv"](layout),
        "swa": POOLS["kv"](layout),
        "indexer": POOLS["indexer"](layout),
        "mamba": POOLS["mamba"](layout if layout != "layer_first" else "page_first"),
    }


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pools_that_share_names_keep_their_own_pages(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's pages have the names of the pages of `kv`, and their pools may be alike."""
    pools = sidecars(layout)
    store = storage(monkeypatch, config(tmp_path), pools)
    for seed, pool in enumerate(pools.values()):
        fill(pool, seed)
    kept = {name: [page_bytes(pool, page) for page in (0, 1)] for name, pool in pools.items()}
    transfers = [
        PoolTransfer(PoolName(name), rows_of(pool, (0, 1)), keys=names(2))
        for name, pool in pools.items()
    ]
    whole = {name: [True, True] for name in pools}
    assert whole == store.batch_set_v2(transfers)
    for pool in pools.values():
        fill(pool, seed=99)
    assert whole == store.batch_get_v2(transfers)
    for name, pool in pools.items():
        assert all(
            torch.equal(before, page_bytes(pool, page)) for page, before in enumerate(kept[name])
        ), name
    store.close()


def test_an_anchor_without_bytes_is_there_once_it_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4's pool `kv` holds no memory: its pages say that the others have theirs."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    pool = LogicalHostPool(64, 4)
    store = storage(monkeypatch, config(tmp_path), {"kv": pool})
    assert store.batch_exists(names(2)) == 0
    assert [True, True] == store.batch_set_v1(names(2), rows_of(pool, (0, 1)))
    assert store.batch_exists(names(2)) == 2
    assert [True, True] == store.batch_get_v1(names(2), rows_of(pool, (2, 3)))
    store.close()
