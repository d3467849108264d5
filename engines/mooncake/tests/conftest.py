"""Mooncake's master and nodes, for each process of pytest its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from cluster import Cluster, raise_loopback
from mooncake.store import MooncakeDistributedStore

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from kvtide.tier import MooncakeTier

# What a call waits for a process that is there and doesn't answer; 30 seconds otherwise.
os.environ |= {"MC_RPC_TIMEOUT_MS": "1500", "MC_TCP_PROGRESS_TIMEOUT_SEC": "1"}

raise_loopback()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two nodes."""
    with closing(Cluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Any]:
    """A client of the store, without kvtide."""
    store = MooncakeDistributedStore()
    assert 0 == store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", cluster.address)
    yield store
    store.close()


@pytest.fixture
def tier(cluster: Cluster, client: Any) -> Iterator[MooncakeTier]:
    """A tier over an empty store."""
    with closing(MooncakeTier(cluster.address)) as tier:
        yield tier
    client.remove_by_regex(".*", True)


@pytest.fixture
def tide() -> Iterator[Tide]:
    """A pool of 256 tokens of 4 KiB, and an arena whose blocks hold 64 of them."""
    with closing(CPUDevice(lanes=1)) as device:
        geometry = GQA.bind(dtype="uint8", token=4, layer=8, head=4, head_dim=64, v_head_dim=64)
        pool = Pool.create(geometry, device, page_count=64)
        yield Tide(pool, HostArena(device, limit_bytes=32 << 20, block_bytes=64 * 4096))
