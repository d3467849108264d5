"""Pools with MiniCPM's compressed keys to make round trips with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.minicpm.cache import attach_compressed_cache
from sglang.srt.mem_cache import memory_pool

from kvtide.plugin.sglang.cases.keys_values import ON_CPU, key_value_probes, mha
from kvtide.plugin.sglang.cases.recurrent_state import (
    STATE_LAYERS,
    hybrid,
    state_params,
    state_probes,
)
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case

KERNEL_SIZE, KERNEL_STRIDE = 4, 2
TOKENS = 45
LEVELS = {"k1": (TOKENS - 4) // 2 + 1, "k2": (TOKENS - 16) // 8 + 1}
"""How many entries TOKENS have: in k1 one for 4 tokens, every 2; in k2 one for 16, every 8."""
SOURCE, TARGET, OTHER = 1, 2, 3


def attach(requests: Any, allocator: Any) -> Any:
    """Attaches a cache of compressed keys to a request pool, and gives the cache."""
    sizes = {"kernel_size": KERNEL_SIZE, "kernel_stride": KERNEL_STRIDE}
    attach_compressed_cache(requests, allocator, **sizes, enable_memory_saver=False)
    return requests._aux_cache


def grow(requests: Any, rows: list[int], length: int) -> None:
    """Gives requests slots for the compressed keys of `length` tokens, as SGLang's steps do."""
    requests.alloc_aux_to_lengths(
        req_pool_indices_cpu=torch.tensor(rows),
        target_seq_lens_cpu=torch.tensor([length] * len(rows)),
    )


def request_pool() -> Any:
    """Makes a request pool with room for four requests of 256 tokens."""
    return memory_pool.ReqToTokenPool(4, 256, **ON_CPU)


def request_pool_with_state() -> Any:
    """Makes a request pool with room for four requests and six recurrent states."""
    return memory_pool.HybridReqToTokenPool(
        size=4,
        mamba_size=6,
        mamba_spec_state_size=6,
        max_context_len=256,
        cache_params=state_params(),
        mamba_layer_ids=STATE_LAYERS,
        enable_mamba_extra_buffer=False,
        **ON_CPU,
    )


def _attached(requests: Any, allocator: Any) -> torch.Tensor:
    """Attaches a cache and fills it for three requests; gives the slots that it has reserved.

    Requests take turns, so that none has consecutive slots. The source has begun a further step,
    the others haven't.
    """
    cache = attach(requests, allocator)
    for length in range(1, TOKENS + 1):
        grow(requests, [SOURCE, TARGET, OTHER], length)
    grow(requests, [SOURCE], TOKENS + 1)
    slots: torch.Tensor = cache.reserved_slots.long()
    return slots


def _mha() -> Built:
    pool, allocator = mha(page_size=1)
    requests = request_pool()
    probes = _probes(pool, requests, _attached(requests, allocator))
    rows = {"request": SOURCE}, {"request": TARGET}
    return Built(pool, allocator, probes, *rows, requests)


def _with_state() -> Built:
    """Builds a pool as in the model: recurrent layers stand between layers with attention."""
    requests = request_pool_with_state()
    pool, allocator = hybrid(requests.mamba_pool, 1)
    probes = _probes(pool.full_kv_pool, requests, _attached(requests, allocator))
    probes += state_probes(requests.mamba_pool)
    rows = {"request": SOURCE, "mamba": 2}, {"request": TARGET, "mamba": 4}
    return Built(pool, allocator, probes, *rows, requests)


def _probes(pool: Any, requests: Any, aside: torch.Tensor) -> list[ByteProbe]:
    """Probes of tokens, of a request's compressed keys, and of the other reserved slots."""
    probes = [_tokens(probe, aside) for probe in key_value_probes(pool)]
    for layer, keys in enumerate(pool.k_buffer):
        probes += [
            _entries(f"{level}.{layer}", keys, requests, level, count)
            for level, count in LEVELS.items()
        ]
        probes.append(_rest(f"aside{layer}", keys, requests, aside))
    return probes


def _tokens(probe: ByteProbe, aside: torch.Tensor) -> ByteProbe:
    """Restricts a probe to slots that tokens can have: reserved slots are left out."""

    def read(slots: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        return probe.read(slots[~torch.isin(slots, aside)], rows)

    return ByteProbe(probe.name, read, probe.buffers)


def _slots_of(requests: Any, level: str, row: int, count: int) -> torch.Tensor:
    """Returns the slots of a request's first entries: 0 where it has no entry."""
    table: torch.Tensor = getattr(requests, f"req_to_sparse_{level}_token")
    return table[row, :count].long()


def _entries(name: str, keys: torch.Tensor, requests: Any, level: str, count: int) -> ByteProbe:
    def read(_: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        return keys[_slots_of(requests, level, rows["request"], count)]

    return ByteProbe(name, read, [keys])


def _rest(name: str, keys: torch.Tensor, requests: Any, aside: torch.Tensor) -> ByteProbe:
    """A probe of reserved slots that aren't the target's; it reads none for source and target."""
    held = [_slots_of(requests, level, TARGET, count) for level, count in LEVELS.items()]
    others = aside[~torch.isin(aside, torch.cat(held))]

    def read(_: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        return keys[others if rows["request"] == OTHER else others[:0]]

    return ByteProbe(name, read, [keys])


_LEFT = (
    "its copy leaves the compressed keys behind; where it would be used, on decode servers, SGLang "
    "refuses such models, and its ordinary servers compute a request again"
)

CASES = [
    Case("MHA beside MiniCPM's compressed keys", _mha, "wrong", TOKENS, 1, _LEFT),
    Case("MHA and state beside MiniCPM's compressed keys", _with_state, "wrong", TOKENS, 1, _LEFT),
]
