"""Pools pass the kit: a created one, and SGLang's NPU pools by their own methods.

The tests run on the CPU, and on the simulated accelerator in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import pytest
import torch

from kvtide.conformance import PoolTests, PoolUnderTest
from kvtide.conformance.pool_under_test import KINDS, Ids
from kvtide.conformance.reference import Bytes
from kvtide.conformance.samples import sample
from kvtide.conformance.ways import TideWay
from kvtide.device import CPUDevice
from kvtide.npu import NPUTokenToKVPool
from kvtide.pool import Pool
from support import npu_pools
from support.simulated import SCHEDULES, simulated


@pytest.fixture(params=["cpu", *SCHEDULES])
def device_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs on the CPU, and on the simulated accelerator in each schedule."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with simulated(request.param) as name:
            yield name


class TestCreatedPool(PoolTests):
    """A created pool with a window beside full attention; the tests write its map."""

    def make_pool(self) -> Pool:
        """Makes a pool in the kit's own storage."""
        self.subject = KINDS["created"](sample("window_and_full"), CPUDevice(lanes=1))
        return self.subject.pool

    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """Reads the pool's buffer."""
        return self.subject.read(plane, layer)

    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """Writes the pool's buffer."""
        self.subject.write(plane, layer, data)

    def write_map(self, pool: Pool, name: str, ids: Ids) -> None:
        """Writes the engine's map."""
        assert self.subject.write_map is not None
        self.subject.write_map(name, ids)


@final
class OwnWay:
    """Moves bytes with a Tide, but isn't the kit's way; `load` may do nothing."""

    def __init__(self, way: TideWay, *, loads: bool) -> None:
        self.way = way
        self.loads = loads

    def save(self, slots: Any, request: int | None) -> Any:
        """Saves with the Tide."""
        return self.way.save(slots, request)

    def load(self, saved: Any, slots: Any, request: int | None) -> None:
        """Restores with the Tide, or does nothing."""
        if self.loads:
            self.way.load(saved, slots, request)

    def drop(self, saved: Any) -> None:
        """Discards the snapshot."""
        self.way.drop(saved)


@pytest.mark.parametrize("loads", [False, True])
def test_a_load_that_does_nothing_fails_wherever_bytes_move(loads: bool) -> None:
    """Every test but that of the planes moves its bytes by the way that the pool gives."""

    class Tests(TestCreatedPool):
        """Tests a pool that gives a way."""

        def make_way(self, subject: PoolUnderTest, block_bytes: int) -> OwnWay:
            """Returns a way that moves with a Tide, or not at all."""
            return OwnWay(TideWay(subject, block_bytes), loads=loads)

    names = [name for name in dir(PoolTests) if name.startswith("test_")]
    passed = [name for name in names if passes(getattr(Tests(), name))]
    assert 9 == len(names)
    assert (names if loads else ["test_planes_lie_where_the_pool_says"]) == passed


def passes(test: Callable[[], None]) -> bool:
    """Whether a test of the kit raises no AssertionError."""
    try:
        test()
    except AssertionError:
        return False
    return True


@final
class CopyWay:
    """Saves and loads by the two methods that SGLang calls."""

    def __init__(self, pool: NPUTokenToKVPool) -> None:
        self.pool = pool
        self.held_count = 0

    def save(self, slots: Any, request: int | None) -> Any:
        """Calls get_cpu_copy."""
        saved = self.pool.get_cpu_copy(slots, req_pool_index=request)
        self.held_count += 1
        return saved

    def load(self, saved: Any, slots: Any, request: int | None) -> None:
        """Calls load_cpu_copy."""
        self.pool.load_cpu_copy(saved, slots, req_pool_index=request)

    def drop(self, saved: Any) -> None:
        """Releases the copy's memory."""
        saved.release()
        self.held_count -= 1
        assert self.held_count or 0 == self.pool.host_used_bytes


class TestNPUPool(PoolTests):
    """NPU pools of every kind."""

    mine: NPUTokenToKVPool

    @pytest.fixture(autouse=True, params=[*npu_pools.KINDS])
    def npu_pool(self, request: pytest.FixtureRequest, device_name: str) -> Iterator[None]:
        """Makes a small pool of the kind."""
        device = npu_pools.small_device(device_name, 2048)
        self.thorough = device_name == "cpu"
        # Pinned memory is never given back, and a usual slab takes 64 MiB for each pool.
        self.mine = npu_pools.KINDS[request.param](device, host_limit_bytes=1 << 20)
        yield
        self.mine.close()
        device.close()

    def make_pool(self) -> Pool:
        """Returns the pool that the NPU pool made of its own buffers."""
        adopted: Pool = self.mine._pool
        return adopted

    def make_way(self, subject: PoolUnderTest, block_bytes: int) -> CopyWay:
        """Returns the NPU pool's own methods; the device decides how much moves at once."""
        return CopyWay(self.mine)

    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """Reads the buffers that SGLang sees."""
        rows = self._buffer(plane, layer).cpu().contiguous().view(torch.uint8).numpy()
        found: Bytes = rows.reshape(pool.plane(plane, layer).shape[0], -1).copy()
        return found

    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """Writes the buffers that SGLang sees."""
        rows = self._buffer(plane, layer).view(torch.uint8)
        rows.copy_(torch.from_numpy(np.ascontiguousarray(data)).view(rows.shape))

    def _buffer(self, plane: str, layer: int) -> torch.Tensor:
        names = {"latent": "k", "rope": "v", "index_scale": "index_k_scale"}
        buffer: torch.Tensor = getattr(self.mine, f"{names.get(plane, plane)}_buffer")[layer]
        return buffer
