"""SGLang's pages of KV in a Mooncake store, which servers on several machines share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtide.plugin.sglang.hicache.backend import Storage
from kvtide.plugin.sglang.hicache.moves import READS_AT_ONCE, WRITES_AT_ONCE
from kvtide.plugin.sglang.hicache.served_model import ServedModel
from kvtide.plugin.sglang.hicache.updates import Updates
from kvtide.tier.mooncake import MooncakeTier
from kvtide.tier.mooncake_client import TRANSFER_FAILED
from tier.fake_mooncake import FakeStore

COUNT, ROWS, ROW_BYTES = 24, 4, 1024
NAMES = [f"{number:064x}" for number in range(COUNT)]
WHOLE, NONE = [True] * COUNT, [False] * COUNT


class HiCacheStorageConfig(SimpleNamespace):
    """SGLang's configuration of a storage, which is known by its name."""


class HostPool:
    """A pool as SGLang's storages see it, with a page in two parts."""

    page_size = ROWS
    layout = "page_first"
    dtype = torch.uint8
    size_per_token = 2 * ROW_BYTES

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = (2, COUNT * ROWS, ROW_BYTES)
        self.memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

    def get_page_buffer_meta(self, rows: torch.Tensor) -> tuple[list[int], list[int]]:
        firsts = rows[::ROWS].tolist()
        addresses = [half[first].data_ptr() for first in firsts for half in self.memory]
        return addresses, [ROWS * ROW_BYTES] * len(addresses)


ROWS_OF_ALL = torch.arange(COUNT * ROWS)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """A store that all servers of a test join."""
    store = FakeStore()
    join = partial(MooncakeTier, open_client=store.open_client)
    monkeypatch.setattr("kvtide.plugin.sglang.hicache.places.MooncakeTier", join)
    monkeypatch.setattr("kvtide.plugin.sglang.hicache.backend.require_hooks", lambda: None)
    monkeypatch.setattr("kvtide.tier.retries.WAITS_S", ())
    monkeypatch.setattr("kvtide.tier.retries.REST_S", 0.0)
    model = ServedModel("sglang", "start", "weights", 1, Updates())
    monkeypatch.setattr(ServedModel, "running", lambda weights: model)
    yield store
    assert all(client.is_closed for client in store.clients)


def server(pool: HostPool, **extra: Any) -> Storage:
    """Makes the storage of a server."""
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, is_storage_writer=True, model_name="model",
        extra_config={"interface_v1": 1, "mooncake": "localhost:50051", **extra},
    )  # fmt: skip
    made = Storage(config)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def test_a_server_finds_the_pages_of_another_machine(mooncake: FakeStore) -> None:
    """Each byte is checked there, and each thread's memory is registered once."""
    here, there = HostPool(1), HostPool(2)
    first, second = server(here), server(there)
    for _ in range(3):
        assert first.batch_set_v1(NAMES, ROWS_OF_ALL) == WHOLE
        assert second.batch_exists([*NAMES, "none"]) == COUNT
        assert second.batch_get_v1(NAMES, ROWS_OF_ALL) == WHOLE
    assert torch.equal(here.memory, there.memory)
    assert len(mooncake.objects) == COUNT
    for client, most in zip(mooncake.clients, (WRITES_AT_ONCE, READS_AT_ONCE), strict=True):
        kept = [size for size in client.ranges.values() if size > 2 * ROWS * ROW_BYTES]
        assert 0 < len(kept) <= most
    first.close()
    second.close()


def test_a_damaged_page_and_a_node_that_is_away_are_misses(mooncake: FakeStore) -> None:
    """A damaged page leaves the store, and comes back with the next set."""
    pool = HostPool(1)
    store = server(pool)
    assert store.batch_set_v1(NAMES, ROWS_OF_ALL) == WHOLE
    name = next(iter(mooncake.objects))
    mooncake.objects[name][-1] ^= 1
    assert sum(store.batch_get_v1(NAMES, ROWS_OF_ALL)) == COUNT - 1
    assert name not in mooncake.objects
    assert store.batch_set_v1(NAMES, ROWS_OF_ALL) == WHOLE
    mooncake.node_code = TRANSFER_FAILED
    assert store.batch_get_v1(NAMES, ROWS_OF_ALL) == NONE
    mooncake.node_code = 0
    assert store.batch_get_v1(NAMES, ROWS_OF_ALL) == WHOLE
    mooncake.is_master_away = True
    assert store.batch_exists(NAMES) == 0
    assert store.batch_get_v1(NAMES, ROWS_OF_ALL) == NONE
    assert store.batch_set_v1(NAMES, ROWS_OF_ALL) == NONE
    mooncake.is_master_away = False
    assert store.batch_get_v1(NAMES, ROWS_OF_ALL) == WHOLE
    store.close()


def test_a_page_that_the_disk_does_not_take_goes_to_the_store(
    mooncake: FakeStore, tmp_path: Path
) -> None:
    """The disk here has no room for a page; a page comes back from wherever it is."""
    here, there = HostPool(1), HostPool(2)
    kept = here.memory.clone()
    first = server(here, disk_dir=str(tmp_path), disk_memory="4096B")
    assert first.batch_set_v1(NAMES, ROWS_OF_ALL) == WHOLE
    assert len(mooncake.objects) == COUNT
    here.memory.zero_()
    assert first.batch_get_v1(NAMES, ROWS_OF_ALL) == WHOLE
    assert torch.equal(kept, here.memory)
    first.close()
    second = server(there)
    assert second.batch_get_v1(NAMES, ROWS_OF_ALL) == WHOLE
    assert torch.equal(kept, there.memory)
    second.close()
