"""open_store: makes a rank's store over vLLM's caches: the pools, the arena, and what is below."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from kvtide.arena import HostArena, arena_of_blocks
from kvtide.arena.budget import default_host_bytes, untouched_bytes_of
from kvtide.device import CPUDevice, Device, open_device
from kvtide.errors import ArenaFull, UsageError
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.block_store import BlockStore, writes_at_once
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.messages import Start, group_of
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.plugin.vllm.tiers_below import TiersBelow, open_below
from kvtide.sizes import counted, format_size
from kvtide.snapshot import beside_bytes_of
from kvtide.tier import Namespace

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class OpenStore:
    """A rank's store, and what the scheduler must know of it."""

    blocks: BlockStore
    start: Start
    namespace: Namespace
    close: Callable[[], None]


def open_store(
    vllm_config: Any,
    config: Any,
    settings: OffloadSettings,
    kv_caches: Any,
    vllm_platform: object,
) -> OpenStore:
    """Opens the store of this rank. `config` is vLLM's OffloadingConfig, and `vllm_platform` its
    current platform.

    Raises Refused or UsageError, which name the remedy, if there is no room for a block or a tier
    can't be used; LayoutError for caches that can't be copied exactly. After an error nothing stays
    open.
    """
    rank, rank_count = config.parallel.rank, config.parallel.world_size
    device = open_device_of(kv_caches)
    below: TiersBelow | None = None
    try:
        groups = adopt_groups(kv_caches, device)
        arena = _arena_for(groups, device, settings.host_memory_bytes, rank_count)
        with suppress(ArenaFull):  # here, and not in a move, it takes its first memory
            arena.lease(1).release()
        below = open_below(settings, rank, rank_count)
        layouts = [group.pool.geometry.canonical for group in groups]
        # Layers of one width differ by their names alone.
        named = [str(group.layer_names) for group in config.groups]
        namespace = namespace_of(
            vllm_config,
            settings,
            layouts,
            vllm_platform,
            is_durable=below.tier is not None,
            beside=named,
        )
        numbers = {group.group_id: number for number, group in enumerate(config.groups)}
        blocks = BlockStore(
            groups, lambda key: numbers[group_of(key)], arena, namespace, below.tier
        )
        start = _start_of(arena, groups, below)
        logger.info("kvtide %s", coverage(groups, arena, below, start))
    except BaseException:
        if below is not None:
            below.close()
        device.close()
        raise

    def close() -> None:
        blocks.close()
        below.close()
        device.close()

    return OpenStore(blocks, start, namespace, close)


def adopt_groups(kv_caches: Any, device: Device) -> list[BlockGroup]:
    """The groups of vLLM's canonical caches. Raises LayoutError if they can't be moved exactly."""
    return [
        BlockGroup.adopt(
            number,
            [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs],
            device,
        )
        for number, refs in enumerate(kv_caches.group_data_refs)
    ]


def coverage(
    groups: Sequence[BlockGroup], arena: HostArena, below: TiersBelow, start: Start
) -> str:
    """What is covered and how much fits, in words."""
    layers = ", ".join(str(len(group.pool.buffers)) for group in groups)
    return (
        f"saves {counted(len(groups), 'group')} of layers ({layers} layers); host memory up to "
        f"{format_size(arena.limit_bytes)} on this rank, for {start.block_count} blocks; {below}"
    )


def open_device_of(kv_caches: Any) -> Device:
    """Opens the device of the caches. Raises Refused without any, or with several."""
    devices: set[torch.device] = {cache.tensor.device for cache in kv_caches.tensors}
    if len(devices) != 1:
        raise Refused(f"kvtide moves the caches of one device, and here are {len(devices)}")
    device = devices.pop()
    return CPUDevice(large_pages=True) if device.type == "cpu" else open_device(str(device))


def _arena_for(
    groups: Sequence[BlockGroup], device: Device, limit_bytes: int | None, rank_count: int
) -> HostArena:
    """The arena of this rank: an equal part. Raises UsageError if not even a block fits."""
    buffers = [buffer for group in groups for buffer in group.pool.buffers]
    together = (
        default_host_bytes(untouched_bytes_of(buffers)) if limit_bytes is None else limit_bytes
    )
    block_bytes = max(group.block_bytes for group in groups)
    share = together // rank_count
    if share < block_bytes:
        raise UsageError(
            f"host_memory: {format_size(together)} for {rank_count} ranks is no room for a block "
            f"of {format_size(block_bytes)}; give each rank room for some blocks"
        )
    beside_bytes = beside_bytes_of(block_bytes, 1, 1)
    return arena_of_blocks(device, share, block_bytes=block_bytes, beside_bytes=beside_bytes)


def _start_of(arena: HostArena, groups: Sequence[BlockGroup], below: TiersBelow) -> Start:
    if below.tier is None:
        return Start(arena.block_count)
    # A block that leaves while it is being written has memory until the write ends.
    room = max(1, arena.block_count - writes_at_once(arena))
    return Start(room, below.names, below.block_count(min(group.block_bytes for group in groups)))
