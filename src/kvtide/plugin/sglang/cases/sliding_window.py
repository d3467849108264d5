"""Pools with sliding windows to make round trips with: SWAKVPool and its allocators."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.swa import (
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtide.plugin.sglang.cases.ascend import by_page, npu_pools, plane
from kvtide.plugin.sglang.cases.keys_values import (
    ON_CPU,
    ReadRows,
    by_head,
    by_token,
    environment,
    layer_probes,
    scattered,
)
from kvtide.plugin.sglang.cases.latent import NO_CUDA, index_probes, last_first
from kvtide.plugin.sglang.cases.recurrent_state import state_params, state_probes
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, Refusal

SIZE, WINDOW_SIZE = 512, 256
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, **ON_CPU}


def window_pool(page_size: int, full_layers: tuple[int, ...] = (1, 3), **options: Any) -> Any:
    """Makes a pool of two layers with full attention and three with a window."""
    return SWAKVPool(
        size=SIZE if full_layers else 0,
        size_swa=WINDOW_SIZE,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        swa_attention_layer_ids=[0, 2, 4],
        full_attention_layer_ids=list(full_layers),
        device="cpu",
        **options,
    )


def allocator_of(pool: Any, page_size: int) -> Any:
    """Makes SGLang's allocator of both kinds of slots, and shuffles both; the last come first."""
    allocator = SWATokenToKVPoolAllocator(
        SIZE, WINDOW_SIZE, page_size, torch.bfloat16, "cpu", pool, False
    )
    last_first(scattered(allocator.full_attn_allocator))
    last_first(scattered(allocator.swa_attn_allocator))
    return allocator


def extend(allocator: Any, token_count: int, tail: int | None = None) -> torch.Tensor:
    """Allocates slots as SGLang's schedulers do; in a window only for the last `tail` tokens."""
    none = torch.zeros(1, dtype=torch.int64)
    count, last = torch.tensor([token_count]), torch.tensor([-1])
    lengths = (none, none, count, count, last, token_count)
    slots: torch.Tensor = (
        allocator.alloc_extend(*lengths)
        if tail is None
        else allocator.alloc_extend_swa_tail(*lengths, tail)
    )
    return slots


def window_probes(pool: Any, gone: int = 0, read: ReadRows = by_token) -> list[ByteProbe]:
    """Probes of both pools' buffers; the first `gone` tokens have left the window."""

    def in_window(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return read(buffer, pool.full_to_swa_index_mapping[slots[gone:]])

    sides = (("full", pool.full_kv_pool, read), ("swa", pool.swa_kv_pool, in_window))
    return [
        probe
        for side, held, rows in sides
        for name, tensors in _buffers(held)
        for probe in layer_probes(f"{side}.{name}", tensors, rows)
    ]


def _buffers(pool: Any) -> list[tuple[str, list[torch.Tensor]]]:
    if isinstance(pool, memory_pool.MLATokenToKVPool):
        return [("latent", pool.kv_buffer)]
    return [("k", pool.k_buffer), ("v", pool.v_buffer)]


def windowed(page_size: int, gone: int = 0, window: int | None = None, **options: Any) -> Built:
    """Builds a pool; when a request is saved, `gone` of its tokens have left the window.

    A request that comes back has rows for all of its tokens, as SGLang's simplest way gives them.
    """
    pool = window_pool(page_size, **options)
    allocator = allocator_of(pool, page_size)
    allocate = allocator.alloc if page_size == 1 else lambda count: extend(allocator, count)
    return Built(
        pool,
        allocator,
        window_probes(pool, gone),
        allocate=allocate,
        prepare=lambda slots: allocator.free_swa_segment(slots[:gone], start_pos=0),
        window_tokens=window,
    )


def with_tail(built: Built, read: ReadRows = by_token) -> Built:
    """A request comes back with rows for its window alone, as on decode servers.

    Of 61 tokens a window of 20 begins within the third page. The source still has the second.
    """
    calls: list[int] = []

    def allocate(count: int) -> torch.Tensor:
        calls.append(count)
        return extend(built.allocator, count, None if len(calls) == 1 else 32)

    built.probes, built.allocate = window_probes(built.pool, 32, read), allocate
    built.window_tokens = 20
    return built


def _by_page() -> Built:
    """Builds pages in which heads come first, [page, head, token, head_dim]."""
    with environment(SGLANG_USE_HND_KVCACHE="1"):
        return with_tail(windowed(16, 16), by_head(16))


def _latent(page_size: int = 16, **options: Any) -> Built:
    mla = memory_pool.MLATokenToKVPool
    wide = {**LATENT, "page_size": page_size}
    pools = {
        "full_kv_pool_class": mla,
        "swa_kv_pool_class": mla,
        "full_kv_pool_kwargs": wide,
        "swa_kv_pool_kwargs": {**wide, "kv_lora_rank": 32},
    }
    return windowed(page_size, page_size, 37 - page_size, **{**pools, **options})


def _sparse() -> Built:
    """Builds latents with index keys beside latents of a window."""
    built = _latent(
        64,
        full_kv_pool_class=memory_pool.DSATokenToKVPool,
        full_kv_pool_kwargs={**LATENT, "kv_cache_dim": 80, "index_head_dim": 128, "page_size": 64},
    )
    built.window_tokens = 100 - 64
    built.probes = [*built.probes, *index_probes(built.pool.full_kv_pool)]
    return built


def _on_npu(fia: bool) -> Built:
    """Builds an NPU's pages, [layer, page, token, head, head_dim]; values have other widths."""
    with ExitStack() as stack:
        stack.enter_context(npu_pools("cpu"))
        with environment(ASCEND_USE_FIA=str(int(fia))):
            pool = window_pool(
                16,
                token_to_kv_pool_class=NPUMHATokenToKVPool,
                v_head_dim=8,
                swa_v_head_dim=24,
            )
        allocator, gone = allocator_of(pool, 16), 16

        def in_window(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return by_page(pool.full_to_swa_index_mapping[slots[gone:]])

        sides = (("full", pool.full_kv_pool, by_page), ("swa", pool.swa_kv_pool, in_window))
        probes = [
            probe
            for side, held, locate in sides
            for name, tensor in (("k", held.k_buffer_tensor), ("v", held.v_buffer_tensor))
            for probe in plane(f"{side}.{name}", tensor, locate)
        ]
        return Built(
            pool,
            allocator,
            probes,
            allocate=lambda count: extend(allocator, count),
            prepare=lambda slots: allocator.free_swa_segment(slots[:gone], start_pos=0),
            window_tokens=37 - gone,
            undo=stack.pop_all().close,
        )


def _windows_alone() -> Built:
    """Builds a pool without full attention: the slots are the window's rows."""
    pool = window_pool(1, full_layers=())
    allocator = PureSWATokenToKVPoolAllocator(WINDOW_SIZE, 1, torch.bfloat16, "cpu", pool, False)
    pool.size = WINDOW_SIZE
    return Built(pool, allocator, window_probes(pool))


def _with_state() -> Built:
    """Builds windows and state. The request pool has the state; the KV pool's copy lacks it."""
    built = windowed(16, gone=16, window=37 - 16)
    requests = memory_pool.HybridReqToTokenPool(
        size=4,
        mamba_size=6,
        mamba_spec_state_size=6,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=state_params(),
        mamba_layer_ids=[0, 2, 4],
        enable_mamba_extra_buffer=False,
    )
    built.request_pool = requests
    built.probes = [*built.probes, *state_probes(requests.mamba_pool)]
    built.sources, built.targets = {"request": 1, "mamba": 2}, {"request": 3, "mamba": 5}
    return built


CASES = [
    Case("SWA, page 1", lambda: windowed(1), "exact", 13, 1),
    Case("SWA, page 16, partial last page", lambda: windowed(16), "exact"),
    Case(
        "SWA, page 1, 8 of 20 tokens out of the window", lambda: windowed(1, 8, 12), "exact", 20, 1
    ),
    Case("SWA, page 16, two pages out of the window", lambda: windowed(16, 32, 29), "exact", 61),
    Case("SWA, fewer rows at the target", lambda: with_tail(windowed(16, 16)), "exact", 61),
    Case("SWA of latents", _latent, "exact"),
    Case(
        "SWA of latents, fewer rows at the target",
        lambda: with_tail(_latent()),
        "crash",
        61,
        reason="rows to leave out are looked for in lists of keys and values, latents aren't such",
    ),
    Case(
        "SWA in HND", _by_page, "crash", 61, reason="its copy refuses this layout by an assertion"
    ),
    Case("SWA of latents beside DSA", _sparse, "crash", 100, 64, NO_CUDA, "no CUDA"),
    *(
        Case(
            f"SWA on an NPU, {'as FIA takes it' if fia else 'plain'}",
            partial(_on_npu, fia),
            "crash",
            reason="values are taken to be as wide as keys",
            only_on="NPU",
        )
        for fia in (False, True)
    ),
    Case("windows alone", _windows_alone, "exact", 20, 1),
    Case("SWA and state in the request pool", _with_state, "exact"),
]

REFUSED = [
    Refusal(
        "SWA without an allocator",
        lambda: Built(window_pool(16), None, []),
        "it has no map from slots to rows of the window yet",
    ),
]
