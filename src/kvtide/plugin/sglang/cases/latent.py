"""Pools of latents to make round trips with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.page_interleave_pool import (
    PageInterleaveDSATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
)
from sglang.srt.runtime_context import get_parallel

from kvtide.plugin.sglang.cases.keys_values import ON_CPU, allocator_for, scattered
from kvtide.plugin.sglang.cases.round_trips import (
    Built,
    ByteProbe,
    Case,
    Refusal,
    request_rows,
    token_rows,
)

KEY_BYTES, SCALE_BYTES = 128, 4
"""The sizes of one index key and of its scale."""
SIZE = 512
NO_CUDA = "waits for torch.cuda, whatever the device"
NO_SCALES = "the scales aren't copied: the values come back under the scales of others"


def shared_context(rank: int, world: int) -> ExitStack:
    """Makes this process one of `world` ranks that share a context, until the stack is closed."""
    stack = ExitStack()
    stack.enter_context(get_parallel().override(attn_dcp_size=world, attn_dcp_rank=rank))
    return stack


def last_first(allocator: Any) -> Any:
    """Makes an allocator give its last page first: a pool must be described to its end."""
    pages = allocator.free_pages
    is_last = pages == pages.max()
    allocator.free_pages = torch.cat([pages[is_last], pages[~is_last]])
    return allocator


def mla(
    page_size: int = 64,
    *,
    kind: Any = memory_pool.MLATokenToKVPool,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Any:
    """Builds a pool of three layers, with latents of 64 elements and ropes of 16."""
    return kind(
        size=SIZE,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=3,
        **ON_CPU,
        **more,
    )


def dsa(page_size: int = 64, **more: Any) -> Any:
    """Builds a pool of latents with index keys; the index keys of a page of 64 tokens are a row."""
    kind = more.pop("kind", memory_pool.DSATokenToKVPool)
    return mla(page_size, kind=kind, index_head_dim=128, kv_cache_dim=80, **more)


def latent_probes(pool: Any, name: str = "kv_buffer") -> list[ByteProbe]:
    """Probes of each layer's rows, [slot, …]."""
    tensors = getattr(pool, name)
    return [
        token_rows(f"{name}{layer}", buffer) for layer, buffer in enumerate(tensors) if len(buffer)
    ]


def dcp_probes(pool: Any, rank: int, world: int) -> list[ByteProbe]:
    """Probes of each layer's rows for the slots that this rank keeps."""

    def of_layer(layer: int, buffer: torch.Tensor) -> ByteProbe:
        def read(slots: torch.Tensor, _: Any) -> torch.Tensor:
            return buffer[slots[slots % world == rank] // world].clone()

        return ByteProbe(f"kv{layer} of rank {rank}", read, [buffer])

    return [of_layer(layer, buffer) for layer, buffer in enumerate(pool.kv_buffer)]


def index_probes(pool: Any) -> list[ByteProbe]:
    """Probes of index keys and scales. A row has first the keys of a page, then their scales."""
    share, count = pool.index_kpool, pool.index_page_size

    def of_layer(layer: int, buffer: torch.Tensor) -> ByteProbe:
        pages = buffer.view(-1, count * (KEY_BYTES + SCALE_BYTES))
        keys = pages[:, : count * KEY_BYTES].view(-1, count, KEY_BYTES)
        scales = pages[:, count * KEY_BYTES :].view(-1, count, SCALE_BYTES)

        def read(slots: torch.Tensor, _: Any) -> torch.Tensor:
            groups = torch.unique_consecutive(slots // share)
            places = groups // count, groups % count
            return torch.cat([keys[places], scales[places]], -1).clone()

        return ByteProbe(f"index_k{layer}", read, [buffer])

    buffers = enumerate(pool.index_k_with_scale_buffer)
    return [of_layer(layer, buffer) for layer, buffer in buffers if len(buffer)]


def tail_probes(pool: Any) -> list[ByteProbe]:
    """Probes of a request's last tokens, which will share an index key once they are enough."""
    tails = {"tail_k": pool._compress_tail_k, "tail_score": pool._compress_tail_score}
    return [
        request_rows(f"{name}{layer}", buffer, "request")
        for name, tensors in tails.items()
        for layer, buffer in enumerate(tensors or ())
        if len(buffer)
    ]


def _built(pool: Any, probes: Sequence[ByteProbe], world: int = 1) -> Built:
    allocator = allocator_for(pool, SIZE * world, pool.page_size * world, pool.dtype)
    return Built(pool, last_first(scattered(allocator)), probes)


def _mla(page_size: int = 64, **more: Any) -> Built:
    pool = mla(page_size, **more)
    return _built(pool, latent_probes(pool))


def _fp4() -> Any:
    return mla(kind=memory_pool.MLATokenToKVPoolFP4)


def _mla_fp4() -> Built:
    pool = _fp4()
    return _built(pool, [*latent_probes(pool), *latent_probes(pool, "kv_scale_buffer")])


def _dsa(page_size: int = 64, **more: Any) -> Built:
    pool = dsa(page_size, **more)
    return _built(pool, [*latent_probes(pool), *index_probes(pool), *tail_probes(pool)])


def _shared(make: Callable[[], Any], rank: int, world: int) -> Built:
    """Builds a rank's pool of latents. If there are index keys, the rank has all of them."""
    with shared_context(rank, world) as stack:
        pool = make()
        probes = dcp_probes(pool, rank, world)
        if hasattr(pool, "index_key_cache"):
            probes += index_probes(pool)
        built = _built(pool, probes, world)
        built.undo = stack.pop_all().close
        return built


def _draft(world: int) -> Built:
    """Builds a draft's pool with the slots and the page size of the ranks' common allocator."""
    with shared_context(1, world) as stack:
        pool = dsa(64 * world, dcp_replicated=True)
        built = _built(pool, [*latent_probes(pool), *index_probes(pool)])
        built.undo = stack.pop_all().close
        return built


def _layer_split(rank: int, **more: Any) -> Built:
    """The first of two ranks has two layers, the second one has the third."""
    group = SimpleNamespace(world_size=1, pynccl_comm=None)
    with get_parallel().override(attn_cp_group=group):
        pool = dsa(
            kind=LayerSplitDSATokenToKVPool, layer_shard_rank=rank, layer_shard_size=2, **more
        )
    return _built(pool, [*latent_probes(pool), *index_probes(pool), *tail_probes(pool)])


GROUPS: dict[str, Any] = {
    "page_size": 128,
    "index_kpool": 2,
    "index_kpool_compress": True,
    "max_running_requests": 4,
}
"""Builds a pool in which two tokens share an index key. The last token may wait for the next."""

CASES = [
    Case("MLA, page 1", lambda: _mla(1), "exact", 13, 1),
    Case("MLA, page 64, partial last page", _mla, "exact", 100, 64),
    Case(
        "MLA fp8 of a later pipeline stage",
        lambda: _mla(dtype=torch.float8_e4m3fn, start_layer=5, end_layer=7),
        "exact",
        100,
        64,
    ),
    Case("MLA fp4, with scales", _mla_fp4, "wrong", 100, 64, NO_SCALES),
    Case("MLA, one of 2 ranks", lambda: _shared(mla, 1, 2), "exact", 201, 128),
    Case("MLA, page 1, one of 4 ranks", lambda: _shared(lambda: mla(1), 2, 4), "exact", 7, 4),
    Case("DSA", _dsa, "crash", 100, 64, NO_CUDA, "no CUDA"),
    Case(
        "DSA, a layer without index keys",
        lambda: _dsa(skip_topk_layers=[False, True, False]),
        "crash",
        100,
        64,
        NO_CUDA,
        "no CUDA",
    ),
    Case(
        "DSA fp8 with scales in the latent's row",
        lambda: _dsa(dtype=torch.float8_e4m3fn),
        "crash",
        100,
        64,
        NO_CUDA,
        "no CUDA",
    ),
    Case(
        "DSA, two tokens an index key, unfinished groups",
        lambda: _dsa(**GROUPS),
        "crash",
        101,
        128,
        NO_CUDA,
        "no CUDA",
    ),
    Case("DSA, one of 2 ranks", lambda: _shared(dsa, 1, 2), "crash", 201, 128, NO_CUDA, "no CUDA"),
    Case(
        "DSA of a draft model beside 2 ranks",
        lambda: _draft(2),
        "crash",
        201,
        128,
        NO_CUDA,
        "no CUDA",
    ),
    Case(
        "DSA, layers split between ranks",
        lambda: _layer_split(0),
        "crash",
        100,
        64,
        NO_CUDA,
        "no CUDA",
    ),
    Case(
        "DSA, layers split between ranks, unfinished groups",
        lambda: _layer_split(1, **GROUPS),
        "crash",
        101,
        128,
        f"the unfinished groups aren't copied; besides, it {NO_CUDA}",
    ),
]

REFUSED = [
    Refusal("MLA fp4, one of 2 ranks", lambda: _shared(_fp4, 1, 2), "no rows for them"),
    Refusal(
        "DSA with HiSparse",
        lambda: _built(dsa(kind=HiSparseDSATokenToKVPool), []),
        "HiSparse's host memory",
    ),
    # To make such a pool needs NCCL.
    Refusal(
        "MLA, pages in turn",
        lambda: Built(object.__new__(PageInterleaveMLATokenToKVPool), None, []),
        "for prefill alone",
    ),
    Refusal(
        "DSA, pages in turn",
        lambda: Built(object.__new__(PageInterleaveDSATokenToKVPool), None, []),
        "for prefill alone",
    ),
]
