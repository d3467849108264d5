"""vLLM's own host memory and tiers on a CPU, where vLLM refuses them: only the copy is ours.

vLLM 0.32 copies with kernels for CUDA and XPU. Here torch copies instead, without any check. All
else is vLLM's: its books, its shared memory, its tiers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PlainCopyWorker(OffloadingWorker):  # type: ignore[misc] # vLLM isn't typed here
    """Copies blocks between the device and vLLM's shared memory, at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._caches = kv_caches
        self._region = region
        self._ended: list[TransferResult] = []
        self._rows = [
            region.create_next_worker_view(cache.page_size_bytes) for cache in kv_caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks off the device."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks to the device."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id: int, inside: Any, outside: Any, *, is_store: bool) -> bool:
        started, size_bytes, first = time.perf_counter(), 0, 0
        for size, refs in zip(inside.group_sizes, self._caches.group_data_refs, strict=True):
            blocks = torch.as_tensor(inside.block_ids[first : first + size], dtype=torch.int64)
            rows = torch.as_tensor(outside.block_ids[first : first + size], dtype=torch.int64)
            first += size
            for ref in refs if size else ():
                width = slice(ref.page_size_bytes)
                device = self._caches.tensors[ref.tensor_idx].tensor[:, width]
                host = self._rows[ref.tensor_idx][:, width]
                if is_store:
                    host[rows] = device[blocks]
                else:
                    device[blocks] = host[rows]
                size_bytes += size * ref.page_size_bytes
        seconds = time.perf_counter() - started
        self._ended.append(TransferResult(job_id, True, size_bytes, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The moves since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """All moves have ended when they begin."""

    def shutdown(self) -> None:
        """Gives the shared memory back."""
        self._rows.clear()
        self._region.cleanup()


class PlainCopySpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering, with PlainCopyWorker."""

    def get_worker(self, kv_caches: Any) -> PlainCopyWorker:
        """The worker of the only rank."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return PlainCopyWorker(kv_caches, region)


def plain_config(
    host_bytes: int, *tiers: dict[str, Any], connector: str = "OffloadingConnector"
) -> dict[str, Any]:
    """What `--kv-transfer-config` takes for vLLM's own host memory with these tiers below it."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "PlainCopySpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
        },
    }
