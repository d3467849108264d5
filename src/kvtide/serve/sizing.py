"""Memory sizes of an engine: the pages of its pool, and whether all of it fits this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtide.arena.budget import free_memory_bytes
from kvtide.device import Device
from kvtide.errors import UsageError
from kvtide.layout import Geometry
from kvtide.pool import Pool
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.options import EngineOptions
from kvtide.serve.request import Request


def count_pages(
    geometry: Geometry,
    options: EngineOptions,
    requests: Sequence[Request],
    free_bytes: int | None,
) -> int:
    """How many pages the pool gets: what fits in `kv_memory_bytes`, or room for `requests`.

    That is room for those that can run at once, were they the longest ones, in at most half of
    `free_bytes`, the memory that is free where the pool will be (None if that isn't known). A
    request that can't be met doesn't count. Raises UsageError for less than one page.
    """
    if options.kv_memory_bytes is not None:
        count = options.kv_memory_bytes // geometry.page_bytes
        if count < 1:
            raise UsageError(
                f"KV memory (--kv-memory) of {options.kv_memory_bytes} bytes holds no page: a page "
                f"takes {geometry.page_bytes} bytes ({geometry.page_size} tokens of "
                f"{geometry.token_bytes})"
            )
        return count
    needs = sorted(
        (_pages_for(request, geometry) for request in requests if _can_be_met(request)),
        reverse=True,
    )
    if free_bytes is not None:
        left_bytes = max(0, free_bytes - (options.host_memory_bytes or 0))
        share = min(free_bytes // 2, left_bytes) // geometry.page_bytes
        if options.on_pressure == "wait":
            share = max(share, needs[0] if needs else 0)
        needs = [need for need in needs if need <= share]
        return max(1, min(share, sum(needs[: options.max_running])))
    return max(1, sum(needs[: options.max_running]))


def reason_to_refuse(request: Request, geometry: Geometry, page_count: int) -> str | None:
    """Why a request can't be answered in a pool of `page_count` pages even when it runs alone."""
    prompt, new, limit = len(request.prompt_ids), request.most_new_tokens, request.context_limit
    if not _can_be_met(request):
        return request.error or (
            f"its prompt has {prompt} tokens, the model has {limit} positions; shorten the prompt"
        )
    needed = _pages_for(request, geometry)
    if needed <= page_count:
        return None
    return (
        f"needs room for {request.longest} tokens ({prompt} of its prompt and {new - 1} of {new} "
        f"new ones: the last one needs none), the pool holds {page_count * geometry.page_size}; "
        f"give it {needed * geometry.page_bytes} bytes of KV memory (--kv-memory) or ask for fewer "
        "new tokens"
    )


def free_bytes_for(device: Device, model: PreTrainedModel) -> int | None:
    """The memory that is free for a pool beside the model; None if the device can't tell."""
    if device.torch_device.type == "cpu":
        return free_memory_bytes()
    try:
        free_bytes, _ = torch.accelerator.get_memory_info(device.torch_device)
    except (AttributeError, RuntimeError):  # not every backend or release of torch can tell
        return None
    if model.device != device.torch_device:
        free_bytes -= sum(tensor.nbytes for tensor in model.state_dict().values())
    return max(0, int(free_bytes))


def create_pool(
    geometry: Geometry, device: Device, page_count: int, options: EngineOptions
) -> Pool:
    """Makes a pool. Raises UsageError if the device hasn't enough memory."""
    try:
        return Pool.create(geometry, device, page_count=page_count)
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        size_bytes = page_count * geometry.page_bytes
        raise UsageError(
            f"device {device.name!r} has no {size_bytes} bytes for the KV pool; {_remedy(options)}"
        ) from error


def move_model(model: PreTrainedModel, device: Device) -> None:
    """Moves the model's weights, in place. Raises UsageError if the device can't hold them."""
    try:
        model.to(device.torch_device)
    except RuntimeError as error:
        raise UsageError(
            f"device {device.name!r} can't take the model: {str(error).splitlines()[0]}"
        ) from error


def spare_after(pool_bytes: int, options: EngineOptions) -> int:
    """The bytes of memory that a pool and its host memory leave.

    Raises UsageError if memory is too small. Later the system would kill the process.
    """
    free_bytes, host_bytes = free_memory_bytes(), options.host_memory_bytes or 0
    if pool_bytes + host_bytes <= free_bytes:
        return free_bytes - pool_bytes - host_bytes
    raise UsageError(
        f"the KV pool takes {pool_bytes} bytes and its host memory up to {host_bytes}, but only "
        f"{free_bytes} are free; {_remedy(options)}"
    )


def _remedy(options: EngineOptions) -> str:
    """What makes the memory suffice: only an option that was given can be set lower."""
    given = {"--kv-memory": options.kv_memory_bytes, "--host-memory": options.host_memory_bytes}
    names = " or ".join(name for name, value in given.items() if value)
    return f"set {names} lower" if names else "end other programs, or ask for fewer new tokens"


def _can_be_met(request: Request) -> bool:
    """Whether the request could be answered in a pool that is large enough."""
    limit = request.context_limit
    return request.error is None and (limit is None or request.longest <= limit)


def _pages_for(request: Request, geometry: Geometry) -> int:
    return -(-request.longest // geometry.page_size)
