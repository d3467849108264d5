"""How fast the tier is beside a plain client of the same store, and beside a copy in memory.

The store is one master and two nodes on this machine, over TCP. After `make test-mooncake`:
    V=.venv-mooncake; engines/mooncake/run.sh $V $V/bin/python benchmarks/tiers/mooncake.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "engines/mooncake/tests")]

from cluster import Cluster, raise_loopback  # noqa: E402
from mooncake.store import MooncakeDistributedStore  # noqa: E402

from kvtide import GQA, HostArena, MooncakeTier, Pool, Tide, open_device  # noqa: E402

TOKEN_BYTES = 4096
BLOCK_BYTES = 4 << 20
TRIES = 9


def rate_of(call: Callable[[], object], size_bytes: int) -> float:
    """MB/s, the median of some tries."""
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return size_bytes / statistics.median(seconds) / 1e6


def measure(tier: MooncakeTier, plain: MooncakeDistributedStore, size_bytes: int) -> list[float]:
    """Copy; put and get of a plain client; put and get of the tier."""
    source = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    target = np.zeros(size_bytes, np.uint8)
    for memory in (source, target):
        assert plain.register_buffer(memory.ctypes.data, size_bytes) == 0

    def put() -> None:
        plain.remove("plain", True)
        assert plain.put_from("plain", source.ctypes.data, size_bytes) == 0

    def get() -> None:
        assert plain.get_into("plain", target.ctypes.data, size_bytes) == size_bytes

    rates = [rate_of(lambda: np.copyto(target, source), size_bytes)]
    rates += [rate_of(put, size_bytes), rate_of(get, size_bytes)]
    plain.remove("plain", True)
    assert np.array_equal(source, target)
    for memory in (source, target):
        plain.unregister_buffer(memory.ctypes.data)

    with closing(open_device("cpu")) as device:
        geometry = GQA.bind(dtype="uint8", token=16, layer=8, head=4, head_dim=64, v_head_dim=64)
        pool = Pool.create(geometry, device, page_count=size_bytes // TOKEN_BYTES // 16)
        arena = HostArena(device, limit_bytes=2 * size_bytes, block_bytes=BLOCK_BYTES)
        tide = Tide(pool, arena)
        snapshot = tide.offload(range(size_bytes // TOKEN_BYTES))
        rates.append(rate_of(lambda: tier.save("tier", snapshot), size_bytes))
        rates.append(rate_of(lambda: tier.load("tier", arena).lease.release(), size_bytes))
        tier.remove("tier")
        tide.discard(snapshot)
    return rates


def main() -> None:
    """Prints a table."""
    raise_loopback()
    with tempfile.TemporaryDirectory() as folder, closing(Cluster(Path(folder))) as cluster:
        plain = MooncakeDistributedStore()
        assert plain.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", cluster.address) == 0
        with closing(MooncakeTier(cluster.address)) as tier:
            print("| MB/s | copy | put, plain | get, plain | put, tier | get, tier |")
            print("|---|---|---|---|---|---|")
            for mebibytes in (4, 16, 32):
                rates = measure(tier, plain, mebibytes << 20)
                print(f"| {mebibytes} MiB |", " | ".join(f"{rate:.0f}" for rate in rates), "|")
        plain.close()


main()
