"""A rank's blocks on an accelerator that does its work as late as it may, or in any order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import AcceleratorDevice
from kvtide.plugin.vllm.block_store import BlockStore, Pairs
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.messages import Orders
from kvtide.tier import DiskTier, Namespace
from support.simulated import simulated

BLOCKS, REUSED, OLD = 12, 0x5A, 0x33
SOURCES = range(1, 10)

Parts = Sequence[Sequence[tuple[int, int]]]
"""For each group of layers its tensors' numbers, and how many bytes of their blocks are KV."""

FORMS: dict[str, tuple[Sequence[int], Parts]] = {
    "full attention": ((8192, 8192), [[(0, 8192), (1, 8192)]]),
    "groups in the same memory": (
        (8192, 8192),
        [[(0, 8192), (1, 8192)], [(0, 8192), (1, 8192)], [(0, 8192)]],
    ),
    "recurrent, padded": ((8192, 8192), [[(0, 7232)], [(1, 7232)], [(0, 8192)]]),
    "odd width": ((8200,), [[(0, 8199)]]),
    "two widths": ((8192, 4096), [[(0, 8192), (1, 4000)]]),
}


def pairs_of(blocks: Sequence[int], group_count: int) -> list[Pairs]:
    """The groups share blocks out; a key names the place of a block, and its group."""
    return [
        [(bytes([place, group]), block) for place, block in enumerate(blocks[group::group_count])]
        for group in range(group_count)
    ]


@pytest.mark.parametrize("schedule", ["lazy", "random:0", "thread"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_come_back_exact_from_host_memory_and_disk(
    form: str, schedule: str, tmp_path: Path
) -> None:
    """The device's steps write a block just before its save, and before its load, and use it later.

    vLLM gives saved blocks to others as soon as it has waited for the move.
    """
    widths, parts = FORMS[form]
    targets = list(SOURCES)
    Random(0).shuffle(targets)
    saved, loaded = (pairs_of(blocks, len(parts)) for blocks in (SOURCES, targets))
    written = [torch.randint(-128, 128, (BLOCKS, width), dtype=torch.int8) for width in widths]
    expected = [torch.full_like(rows, OLD) for rows in written]
    for layers, sources, places in zip(parts, saved, loaded, strict=True):
        for (_, source), (_, target) in zip(sources, places, strict=True):
            for number, width in layers:
                expected[number][target, :width] = written[number][source, :width]

    with simulated(schedule) as name:
        device = AcceleratorDevice(name)
        caches = [torch.zeros_like(rows, device=name) for rows in written]
        steps = [rows.to(name) for rows in written]
        groups = [
            BlockGroup.adopt(number, [(caches[part], width) for part, width in layers], device)
            for number, layers in enumerate(parts)
        ]
        size = max(group.block_bytes for group in groups)
        arena = HostArena(device, limit_bytes=size * len(SOURCES), block_bytes=size)
        disk = DiskTier(tmp_path, limit_bytes=1 << 24)
        for is_first in (True, False):
            names = Namespace(model="m", weights="w", layout="l")
            store = BlockStore(groups, lambda key: key[-1], arena, names, disk)
            if is_first:
                copy_later(caches, steps)
                store.save(1, saved)
                end_well(store, 1)
            else:
                fetch(store, [key for group in saved for key, _ in group])
            fill_later(caches, REUSED)
            fill_later(caches, OLD)
            store.load(2, loaded)
            end_well(store, 2)
            found = [rows.cpu() for rows in caches]
            store.close()
            assert not arena.used_bytes
            assert all(map(torch.equal, expected, found))
        disk.close()
        device.close()


def copy_later(caches: Sequence[torch.Tensor], steps: Sequence[torch.Tensor]) -> None:
    """Queues on the device what a model's step writes."""
    for cache, step in zip(caches, steps, strict=True):
        cache.copy_(step)


def fill_later(caches: Sequence[torch.Tensor], value: int) -> None:
    """Queues on the device what another request's step writes into all blocks."""
    for cache in caches:
        cache.fill_(value)


def end_well(store: BlockStore, job_id: int) -> None:
    """Waits for a move, as vLLM does before it gives the blocks away."""
    store.wait([job_id])
    (ended,) = store.take_ended()
    assert ended.went_well


def fetch(store: BlockStore, keys: list[bytes]) -> None:
    """Brings blocks from the disk to host memory."""
    store.follow(Orders(fetch=keys))
    store.wait_for_fetches(60)
    assert len(keys) == len(store.take_report().fetched)


@pytest.mark.parametrize("schedule", ["lazy", "random:0", "thread"])
def test_a_load_of_a_damaged_block_fails(schedule: str) -> None:
    """The block goes by staging there, so it is checked when the device has copied it."""
    with simulated(schedule) as name:
        device = AcceleratorDevice(name)
        cache = torch.zeros(BLOCKS, 8192, dtype=torch.int8, device=name)
        group = BlockGroup.adopt(0, [(cache, 8192)], device)
        arena = HostArena(device, limit_bytes=8192, block_bytes=8192)
        store = BlockStore([group], lambda _: 0, arena, Namespace(model="", weights="", layout=""))
        pairs: list[Pairs] = [[(b"a", 1)]]
        store.save(1, pairs)
        end_well(store, 1)
        (block,) = store._held[b"a"].lease.blocks
        block.bytes_view(8192)[8191] ^= 1
        store.load(2, pairs)
        store.wait([2])
        (ended,) = store.take_ended()
        assert (False, {b"a"}) == (ended.went_well, store.take_report().lost)
        store.close()
        device.close()
