"""How many bytes an engine may take: of the KV pool, of host memory, of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtide.device import Device
from kvtide.errors import UsageError
from kvtide.layout import Geometry
from kvtide.pool import Pool
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.request import Request
from kvtide.transfer import chunk_tokens_for

_LEAST_CHUNK_BYTES = 1 << 16
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def count_pages(
    geometry: Geometry, kv_memory_bytes: int | None, requests: Sequence[Request]
) -> int:
    """The pages that `kv_memory_bytes` hold; None is as many as all `requests` need at once.

    Raises UsageError for less than one page.
    """
    if kv_memory_bytes is None:
        return max(1, sum(-(-request.longest // geometry.page_size) for request in requests))
    count = kv_memory_bytes // geometry.page_bytes
    if count < 1:
        raise UsageError(
            f"KV memory (--kv-memory) of {kv_memory_bytes} bytes holds no page: one takes "
            f"{geometry.page_bytes} bytes ({geometry.page_size} tokens of {geometry.token_bytes})"
        )
    return count


def create_pool(geometry: Geometry, device: Device, page_count: int) -> Pool:
    """A pool, or UsageError where the device can't give the memory."""
    try:
        return Pool.create(geometry, device, page_count=page_count)
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        size_bytes = page_count * geometry.page_bytes
        raise UsageError(
            f"device {device.name!r} has no {size_bytes} bytes for the KV pool; "
            "set --kv-memory lower"
        ) from error


def move_model(model: PreTrainedModel, device: Device) -> None:
    """Moves the model's weights, in place; UsageError where the device can't hold them."""
    try:
        model.to(device.torch_device)
    except RuntimeError as error:
        raise UsageError(
            f"device {device.name!r} can't take the model: {str(error).splitlines()[0]}"
        ) from error


def block_bytes_for(geometry: Geometry, device: Device, limit_bytes: int) -> int:
    """The size of the arena's blocks, which is also that of a chunk.

    What the device moves best at once, but no more than a 16th of a small arena: a request takes
    whole blocks of it.
    """
    chunk_bytes = min(device.chunk_bytes, max(_LEAST_CHUNK_BYTES, limit_bytes // 16))
    return chunk_tokens_for(geometry, chunk_bytes) * geometry.token_bytes


def check_memory(pool_bytes: int, host_bytes: int | None) -> None:
    """Refuses at the start what the system would kill the process for later."""
    free_bytes = free_memory_bytes()
    if pool_bytes + (host_bytes or 0) > free_bytes:
        raise UsageError(
            f"the KV pool takes {pool_bytes} bytes and its host memory up to {host_bytes or 0}, "
            f"but only {free_bytes} are free; set --kv-memory or --host-memory lower, "
            "or ask for fewer new tokens"
        )


def default_host_bytes(pool_bytes: int) -> int:
    """The arena's limit where none was asked for: a quarter of what the pool leaves free.

    The pool counts in full, though the system gives its memory only as it is written.
    """
    return max(0, free_memory_bytes() - pool_bytes) // 4


def free_memory_bytes() -> int:
    """What the system, and the container, can give without swapping: caches count as free."""
    return min([_free_system_bytes(), *_free_container_bytes()])


def _free_container_bytes() -> Iterator[int]:
    """What control group v2 leaves, if there is one with a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        yield max(0, limit - int((_CONTROL_GROUP / "memory.current").read_text()))


def _free_system_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration), Path("/proc/meminfo").open() as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
