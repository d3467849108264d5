"""Memory sizes of an engine: the pages of its pool, and whether all of it fits this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.arena.budget import free_memory_bytes
from kvtide.device import Device
from kvtide.errors import UsageError
from kvtide.layout import Geometry
from kvtide.pool import Pool
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.request import Request


def count_pages(
    geometry: Geometry, kv_memory_bytes: int | None, requests: Sequence[Request]
) -> int:
    """How many pages fit in `kv_memory_bytes`, or, if that is None, all `requests` need at once.

    Raises UsageError for less than one page.
    """
    if kv_memory_bytes is None:
        return max(1, sum(-(-request.longest // geometry.page_size) for request in requests))
    count = kv_memory_bytes // geometry.page_bytes
    if count < 1:
        raise UsageError(
            f"KV memory (--kv-memory) of {kv_memory_bytes} bytes holds no page: a page takes "
            f"{geometry.page_bytes} bytes ({geometry.page_size} tokens of {geometry.token_bytes})"
        )
    return count


def create_pool(geometry: Geometry, device: Device, page_count: int) -> Pool:
    """Makes a pool. Raises UsageError if the device hasn't enough memory."""
    try:
        return Pool.create(geometry, device, page_count=page_count)
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        size_bytes = page_count * geometry.page_bytes
        raise UsageError(
            f"device {device.name!r} has no {size_bytes} bytes for the KV pool; "
            "set --kv-memory lower"
        ) from error


def move_model(model: PreTrainedModel, device: Device) -> None:
    """Moves the model's weights, in place. Raises UsageError if the device can't hold them."""
    try:
        model.to(device.torch_device)
    except RuntimeError as error:
        raise UsageError(
            f"device {device.name!r} can't take the model: {str(error).splitlines()[0]}"
        ) from error


def check_memory(pool_bytes: int, host_bytes: int | None) -> None:
    """Raises UsageError if memory is too small. Later the system would kill the process."""
    free_bytes = free_memory_bytes()
    if pool_bytes + (host_bytes or 0) > free_bytes:
        raise UsageError(
            f"the KV pool takes {pool_bytes} bytes and its host memory up to {host_bytes or 0}, "
            f"but only {free_bytes} are free; set --kv-memory or --host-memory lower, "
            "or ask for fewer new tokens"
        )
