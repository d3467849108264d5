"""A page stands for no other page: another pool, layout, dtype, model, weights or rank misses."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_case import (
    config,
    fill,
    keys_values,
    latents,
    names,
    page_bytes,
    rows_of,
    storage,
)
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvtide.plugin.sglang.hicache.presence import leading, with_all, with_last
from kvtide.plugin.sglang.hicache.updates import Updates
from kvtide.tier.disk import DiskTier

COUNT = 3
PAGES = tuple(range(COUNT))
WHOLE = [True] * COUNT
NONE = [False] * COUNT
SERVER: dict[str, Any] = {
    "layout": "page_first",
    "dtype": torch.bfloat16,
    "heads": 2,
    "weights": "w",
    "engine": "sglang 1",
    "tp": (0, 1),
    "model": "m",
}
OTHER: dict[str, Any] = {
    "layout": "page_first_direct",
    "dtype": torch.float16,
    "heads": 4,
    "weights": "v",
    "engine": "sglang 2",
    "tp": (0, 2),
    "model": "n",
}


def server(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Makes the storage of a server, and its pool `kv`."""
    facts = {**SERVER, **changes}
    pool = keys_values(facts["layout"], facts["dtype"], facts["heads"])
    about = config(folder, tp=facts["tp"])
    about.model_name = facts["model"]
    made = storage(
        monkeypatch, about, {"kv": pool}, weights=facts["weights"], engine=facts["engine"]
    )
    return made, pool


def folder_of(shard: str, root: Path) -> Path:
    """Finds the folder of a rank."""
    return next((root / "hicache").glob(f"{shard}*"))


@pytest.mark.parametrize("changed", [None, *OTHER])
def test_only_the_same_server_finds_a_page(
    changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the same server has its pages; with one thing changed it has none."""
    first, pool = server(monkeypatch, tmp_path)
    fill(pool)
    assert first.batch_set_v1(names(COUNT), rows_of(pool, PAGES)) == WHOLE
    first.close()
    changes = {changed: OTHER[changed]} if changed else {}
    if changed == "tp":  # so that the folder's name isn't what tells the ranks apart
        folder_of("tp0of1", tmp_path).rename(tmp_path / "hicache" / "tp0of2-pp0of1-cp0of1.0")
    second, pool = server(monkeypatch, tmp_path, **changes)
    expected = WHOLE if changed is None else NONE
    assert second.batch_exists(names(COUNT)) == sum(expected)
    assert second.batch_get_v1(names(COUNT), rows_of(pool, PAGES)) == expected
    second.close()


def test_a_page_in_parts_is_no_flat_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's flat pages have the same bytes in another order."""
    pool = keys_values("layer_first")
    parts = storage(monkeypatch, config(tmp_path), {"kv": pool})
    assert parts.batch_set_v1(names(COUNT), rows_of(pool, PAGES)) == WHOLE
    parts.close()
    flat = storage(monkeypatch, config(tmp_path, interface_v1=0), {"kv": pool})
    assert flat.batch_exists(names(COUNT)) == 0
    flat.close()


# ---- weights -----------------------------------------------------------------------------


def test_weights_that_change_in_place_hide_older_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept until SGLang has forgotten the KV of older weights."""
    updates, pool = Updates(), keys_values("page_first")
    store = storage(monkeypatch, config(tmp_path), {"kv": pool}, updates=updates)
    fill(pool)
    rows = rows_of(pool, PAGES)
    assert store.batch_set_v1(names(COUNT), rows) == WHOLE
    updates.note_update()
    assert store.batch_get_v1(names(COUNT), rows) == NONE
    assert store.batch_exists(names(COUNT)) == 0
    assert store.batch_set_v1(names(COUNT), rows) == NONE, "it may be KV of the older weights"
    updates.note_flush()
    fill(pool, seed=1)
    newer = page_bytes(pool, 1)
    assert store.batch_set_v1(names(COUNT), rows) == WHOLE
    fill(pool)
    assert store.batch_get_v1(names(COUNT), rows) == WHOLE
    assert torch.equal(newer, page_bytes(pool, 1))
    store.close()


def test_an_update_during_a_read_makes_it_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads run in a thread of their own, beside the one that changes weights."""
    updates, pool = Updates(), keys_values("page_first")
    store = storage(monkeypatch, config(tmp_path), {"kv": pool}, updates=updates)
    assert store.batch_set_v1(names(COUNT), rows_of(pool, PAGES)) == WHOLE
    original = DiskTier.get

    def get(*arguments: Any) -> Any:
        updates.note_update()
        return original(*arguments)

    monkeypatch.setattr(DiskTier, "get", get)
    assert store.batch_get_v1(names(COUNT), rows_of(pool, PAGES)) == NONE
    store.close()


# ---- ranks -------------------------------------------------------------------------------


def test_servers_on_one_folder_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder has one writer; after a restart each server finds one of them again."""
    first, pool = server(monkeypatch, tmp_path)
    second, _ = server(monkeypatch, tmp_path)
    assert first.batch_set_v1(names(COUNT), rows_of(pool, PAGES)) == WHOLE
    assert second.batch_exists(names(COUNT)) == 0
    first.close()
    second.close()
    again, _ = server(monkeypatch, tmp_path)
    assert again.batch_exists(names(COUNT)) == COUNT
    again.close()


def test_tenants_neither_find_nor_clear_each_others_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a folder named by a hash of its secret; the keys in it depend on the secret, too."""

    def tenants_server(salt: str) -> tuple[Any, Any]:
        monkeypatch.setenv("KVTIDE_SALT", salt)
        return server(monkeypatch, tmp_path)

    first, pool = tenants_server("secret of the first")
    assert first.batch_set_v1(names(COUNT), rows_of(pool, PAGES)) == WHOLE
    first.close()
    (folder,) = tmp_path.iterdir()
    assert "secret" not in folder.name
    second, _ = tenants_server("secret of the second")
    assert second.batch_exists(names(COUNT)) == 0
    second.clear()
    second.close()
    again, _ = tenants_server("secret of the first")
    assert again.batch_exists(names(COUNT)) == COUNT
    again.close()
    (other,) = {*tmp_path.iterdir()} - {folder}
    shutil.rmtree(other)
    folder.rename(other)
    second, _ = tenants_server("secret of the second")
    assert second.batch_exists(names(COUNT)) == 0
    second.close()


def ranks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[Any, dict[str, Any]]]:
    """Makes the storages of two ranks with latents, index keys, and a draft model's keys."""
    made = []
    for rank in range(2):
        kv, indexer = latents("page_first")
        pools = {"kv": kv, "indexer": indexer}
        made.append((storage(monkeypatch, config(folder, tp=(rank, 2), mla=True), pools), pools))
    return made


def test_all_ranks_read_the_latents_that_one_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang lets rank 0 write them; the others have the same."""
    (writer, written), (reader, read) = ranks(monkeypatch, tmp_path)
    assert ["tp0of2-pp0of1-cp0of1.0"] == [path.name for path in (tmp_path / "hicache").iterdir()]
    transfers = []
    for pools in (written, read):
        transfers.append(
            [
                PoolTransfer(PoolName(name), rows_of(pool, PAGES), keys=names(COUNT))
                for name, pool in pools.items()
            ]
        )
    for seed, pool in enumerate(written.values()):
        fill(pool, seed)
    whole = dict.fromkeys(written, WHOLE)
    assert whole == writer.batch_set_v2(transfers[0])
    assert COUNT == reader.batch_exists(names(COUNT))
    assert whole == reader.batch_get_v2(transfers[1])
    for name in written:
        assert all(
            torch.equal(page_bytes(written[name], page), page_bytes(read[name], page))
            for page in PAGES
        ), name
    reader.close()
    writer.close()


def test_a_damaged_page_is_a_miss_for_readers_and_their_writer_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its owner may move a file aside."""
    (writer, written), (reader, _) = ranks(monkeypatch, tmp_path)
    rows = rows_of(written["kv"], PAGES)
    assert writer.batch_set_v1(names(COUNT), rows) == WHOLE
    for path in (tmp_path / "hicache").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert reader.batch_get_v1(names(COUNT), rows) == NONE
    assert reader.batch_exists(names(COUNT)) == COUNT
    assert writer.batch_get_v1(names(COUNT), rows) == NONE
    assert reader.batch_exists(names(COUNT)) == 0
    reader.close()
    writer.close()


def test_a_ranks_share_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model beside latents may have keys and values, of which each rank has some heads."""
    stores = []
    for rank in range(2):
        pools = {"kv": latents("page_first")[0], "draft": keys_values("page_first")}
        stores.append(storage(monkeypatch, config(tmp_path, tp=(rank, 2), mla=True), pools))
    transfers = [PoolTransfer(PoolName.DRAFT, rows_of(pools["draft"], PAGES), keys=names(COUNT))]
    assert stores[0].batch_set_v2(transfers) == {"draft": WHOLE}
    assert stores[1].batch_get_v2(transfers) == {"draft": NONE}
    for store in stores:
        store.close()


# ---- prefixes ----------------------------------------------------------------------------


def test_prefixes_are_those_whose_pages_are_there() -> None:
    """All combinations of five pages, beside the definition."""
    for found in product((False, True), repeat=5):
        assert leading(found) == max(n for n in range(6) if all(found[:n]))
        assert with_all(found) == [n for n in range(1, 6) if all(found[:n])]
        for last in (1, 2, 5, 9):
            expected = [n for n in range(1, 6) if all(found[max(0, n - last) : n])]
            assert with_last(found, last) == expected


@pytest.mark.parametrize(
    ("policy", "keys", "expected"),
    [
        (PoolHitPolicy.ALL_PAGES, None, (1, {"kv": 3, "swa": 1}, [1])),
        (PoolHitPolicy.TRAILING_PAGES, 1, (3, {"kv": 3, "swa": 3}, [1, 3])),
        (PoolHitPolicy.TRAILING_PAGES, 2, (1, {"kv": 3, "swa": 1}, [1])),
        (PoolHitPolicy.BLOCK_GROUPS, None, (3, {"kv": 3}, [1, 2, 3])),
    ],
)
def test_a_prefix_needs_the_pages_of_all_pools(
    policy: PoolHitPolicy,
    keys: int | None,
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows need their last pages alone; here the second page of a window is missing."""
    pools = {"kv": keys_values("page_first"), "swa": keys_values("page_first")}
    store = storage(monkeypatch, config(tmp_path), pools)
    assert store.batch_set_v1(names(COUNT), rows_of(pools["kv"], PAGES)) == WHOLE
    windows = PoolTransfer(PoolName.SWA, rows_of(pools["swa"], (0, 2)))
    windows.keys = [names(COUNT)[0], names(COUNT)[2]]
    assert store.batch_set_v2([windows]) == {"swa": [True, True]}
    asked = PoolTransfer(PoolName.SWA, keys=names(keys) if keys else None, hit_policy=policy)
    result = store.batch_exists_v2([*names(COUNT), "none"], [asked])
    assert expected == (
        result.kv_hit_pages,
        result.extra_pool_hit_pages,
        result.restorable_prefix_pages,
    )
    store.close()
