"""Small caches in each way in which vLLM lays blocks out, and a round trip of each.

`kvtide doctor --vllm` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.plugin.vllm.block_store import BlockStore
from kvtide.plugin.vllm.open_store import adopt_groups
from kvtide.plugin.vllm.spec import KeySpec, KvtideWorker
from kvtide.tier import Namespace

_BLOCKS = 12
_SAVED, _LOADED = (1, 4, 7), (9, 2, 5)
"""The ids of the blocks that are saved, and of those that they are loaded to."""
_POISON = 0x5A


@final
@dataclass(frozen=True, slots=True)
class BlockCase:
    """Caches as vLLM hands them over: tensors of blocks, and for each group of layers its parts.

    `widths` are the bytes of a block in each tensor, with padding. A part is a tensor's number and
    how many bytes of its blocks are KV.
    """

    name: str
    widths: tuple[int, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]


CASES = (
    BlockCase("full attention, bfloat16", (8192, 8192), (((0, 8192), (1, 8192)),)),
    BlockCase("full attention, fp8", (4096, 4096), (((0, 4096), (1, 4096)),)),
    BlockCase("latent attention", (18432, 18432), (((0, 18432), (1, 18432)),)),
    BlockCase(
        "windows beside full attention, in the same memory",
        (8192, 8192),
        (((0, 8192), (1, 8192)), ((0, 8192), (1, 8192)), ((0, 8192),)),
    ),
    BlockCase(
        "recurrent state beside full attention, padded to one size",
        (8192, 8192),
        (((0, 7168 + 64),), ((1, 7168 + 64),), ((0, 8192),)),
    ),
    BlockCase("all layers of a block side by side", (24576,), (((0, 24576),), ((0, 24576),))),
)
"""One case for each way in which vLLM 0.32 lays blocks out; two groups' blocks have other ids."""


def make_trips() -> Iterator[tuple[str, str | None]]:
    """Tries each case: its name, and what is wrong, or None."""
    for number, case in enumerate(CASES):
        yield case.name, _go(case, number)


def _go(case: BlockCase, seed: int) -> str | None:
    """Saves blocks of all groups, poisons everything, loads them elsewhere and compares."""
    make = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (_BLOCKS, width), dtype=torch.int8, generator=make)
        for width in case.widths
    ]
    before = [tensor.clone() for tensor in tensors]
    device = CPUDevice(lanes=1)
    try:
        groups = adopt_groups(_handed_over(case, tensors), device)
        size = max(group.block_bytes for group in groups)
        arena = HostArena(device, limit_bytes=size * len(_SAVED), block_bytes=size)
        names = Namespace(model="doctor", weights="", layout="")
        store = BlockStore(groups, lambda key: key[-1], arena, names)
        worker = KvtideWorker(store, store.close)
        keys, sources = _of_groups(case, _SAVED)
        worker.submit_store(1, sources, keys)
        ended = list(_ended(worker, 1))
        for tensor in tensors:
            tensor.fill_(_POISON)
        _, targets = _of_groups(case, _LOADED)
        worker.submit_load(2, keys, targets)
        ended += _ended(worker, 2)
        worker.shutdown()
    finally:
        device.close()
    if worker.failed_loads or len(ended) != 2:
        return "blocks that were saved weren't loaded"
    return _differing(case, before, tensors)


def _handed_over(case: BlockCase, tensors: Sequence[torch.Tensor]) -> Any:
    """The caches in vLLM's canonical form."""
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(*part) for part in parts] for parts in case.groups],
    )


def _of_groups(case: BlockCase, blocks: Sequence[int]) -> tuple[Any, Any]:
    """The keys, and vLLM's list of blocks on the device; the groups take turns in `blocks`."""
    groups = range(len(case.groups))
    by_group = [list(blocks[group :: len(groups)]) for group in groups]
    keys = [bytes([place, group]) for group in groups for place in range(len(by_group[group]))]
    ids = [block for part in by_group for block in part]
    inside = GPULoadStoreSpec(
        ids, group_sizes=[len(part) for part in by_group], block_indices=[0 for _ in groups]
    )
    return KeySpec(keys), inside


def _ended(worker: Any, job_id: int) -> Iterator[Any]:
    worker.wait({job_id})
    return (result for result in worker.get_finished() if result.job_id == job_id)


def _differing(
    case: BlockCase, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> str | None:
    """The first place with a wrong byte; all that wasn't loaded must still be poison."""
    expected = [torch.full_like(tensor, _POISON) for tensor in before]
    for place, (source, target) in enumerate(zip(_SAVED, _LOADED, strict=True)):
        for number, width in case.groups[place % len(case.groups)]:
            expected[number][target, :width] = before[number][source, :width]
    for number, (wanted, found) in enumerate(zip(expected, after, strict=True)):
        wrong = (wanted != found).nonzero()
        if len(wrong):
            block, byte = wrong[0].tolist()
            return (
                f"{len(wrong)} wrong bytes, the first is {byte} of block {block}, tensor {number}"
            )
    return None
