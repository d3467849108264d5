"""Pools pass the kit: a created one, and SGLang's NPU pools by their own methods, on the CPU and
on the simulated accelerator in all its schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
import pytest
import torch

from kvtide.conformance import PoolTests, PoolUnderTest
from kvtide.conformance.pool_under_test import KINDS, Ids
from kvtide.conformance.reference import Bytes
from kvtide.conformance.samples import sample
from kvtide.device import CPUDevice
from kvtide.npu import NPUTokenToKVPool
from kvtide.pool import Pool
from support import npu_pools
from support.simulated import SCHEDULES, simulated


@pytest.fixture(params=["cpu", *SCHEDULES])
def device_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU, and the simulated accelerator in each schedule."""
    if request.param == "cpu":
        yield "cpu"
    else:
        with simulated(request.param) as name:
            yield name


class TestCreatedPool(PoolTests):
    """A window beside full attention: the maps are written through the hook."""

    def make_pool(self) -> Pool:
        """Of the kit's own storage."""
        self.subject = KINDS["created"](sample("window_and_full"), CPUDevice(lanes=1))
        return self.subject.pool

    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """From the pool's buffer."""
        return self.subject.read(plane, layer)

    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """To the pool's buffer."""
        self.subject.write(plane, layer, data)

    def write_map(self, pool: Pool, name: str, ids: Ids) -> None:
        """To the engine's map."""
        assert self.subject.write_map is not None
        self.subject.write_map(name, ids)


@final
class CopyWay:
    """There and back by the two methods that SGLang calls."""

    def __init__(self, pool: NPUTokenToKVPool) -> None:
        self.pool = pool

    def save(self, slots: Any, request: int | None) -> Any:
        """get_cpu_copy."""
        return self.pool.get_cpu_copy(slots, req_pool_index=request)

    def load(self, saved: Any, slots: Any, request: int | None) -> None:
        """load_cpu_copy."""
        self.pool.load_cpu_copy(saved, slots, req_pool_index=request)

    def drop(self, saved: Any) -> None:
        """Gives its memory back."""
        saved.release()
        assert 0 == self.pool.host_used_bytes


class TestNPUPool(PoolTests):
    """Every kind of them."""

    mine: NPUTokenToKVPool

    @pytest.fixture(autouse=True, params=[*npu_pools.KINDS])
    def npu_pool(self, request: pytest.FixtureRequest, device_name: str) -> Iterator[None]:
        """A small one."""
        device = npu_pools.small_device(device_name, 2048)
        self.thorough = device_name == "cpu"
        # Pinned memory is for good: of the usual slab each of these pools would keep 64 MiB.
        self.mine = npu_pools.KINDS[request.param](device, host_limit_bytes=1 << 20)
        yield
        self.mine.close()
        device.close()

    def make_pool(self) -> Pool:
        """What the NPU pool adopted of itself."""
        adopted: Pool = self.mine._pool
        return adopted

    def make_way(self, subject: PoolUnderTest, block_bytes: int) -> CopyWay:
        """Its own methods; what moves at once is the device's."""
        return CopyWay(self.mine)

    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """From the buffers that SGLang sees."""
        rows = self._buffer(plane, layer).cpu().contiguous().view(torch.uint8).numpy()
        found: Bytes = rows.reshape(pool.plane(plane, layer).shape[0], -1).copy()
        return found

    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """To the same."""
        rows = self._buffer(plane, layer).view(torch.uint8)
        rows.copy_(torch.from_numpy(np.ascontiguousarray(data)).view(rows.shape))

    def _buffer(self, plane: str, layer: int) -> torch.Tensor:
        names = {"latent": "k", "rope": "v", "index_scale": "index_k_scale"}
        buffer: torch.Tensor = getattr(self.mine, f"{names.get(plane, plane)}_buffer")[layer]
        return buffer
