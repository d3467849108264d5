"""Pools of keys and values to make round trips with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case

ON_CPU: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}

ReadRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Copies what some slots, int64 [token], own of a layer's buffer."""


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables of SGLang inside this context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def allocator_for(pool: Any, size: int, page_size: int, dtype: torch.dtype) -> Any:
    """Makes SGLang's allocator of slots, or of pages."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(size, page_size, dtype, "cpu", pool, False)


def scattered(allocator: Any) -> Any:
    """Shuffles an allocator's free slots or pages, as hours of use would do."""
    everything = allocator.alloc(allocator.available_size()).view(-1, allocator.page_size)
    for page in torch.randperm(len(everything)):
        allocator.free(everything[page])
    return allocator


def mha(
    page_size: int = 16,
    *,
    kind: Any = memory_pool.MHATokenToKVPool,
    dtype: torch.dtype = torch.bfloat16,
    widths: tuple[int, int] = (16, 16),
    size: int = 256,
    world: int = 1,
    **more: Any,
) -> tuple[Any, Any]:
    """Builds a pool of three layers and two heads, and an allocator for `world` ranks."""
    pool = kind(
        size=size,
        page_size=page_size,
        dtype=dtype,
        head_num=2,
        head_dim=widths[0],
        v_head_dim=widths[1],
        layer_num=3,
        **ON_CPU,
        **more,
    )
    return pool, scattered(allocator_for(pool, size * world, page_size * world, dtype))


def by_token(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Reads a buffer [slot, …]."""
    return buffer[slots]


def by_head(page_size: int) -> ReadRows:
    """Reads a buffer [page, head, token, …]."""
    return lambda buffer, slots: buffer[slots // page_size, :, slots % page_size]


def layer_probes(
    name: str,
    buffers: Sequence[torch.Tensor],
    read: ReadRows = by_token,
    held_in: Sequence[torch.Tensor] | None = None,
) -> list[ByteProbe]:
    """A probe for each layer. `held_in` has the tensors that the buffers view, maybe with gaps."""
    raw = [buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer for buffer in buffers]

    def of_layer(layer: int, buffer: torch.Tensor, whole: torch.Tensor) -> ByteProbe:
        return ByteProbe(f"{name}{layer}", lambda slots, _: read(buffer, slots), [whole])

    pairs = zip(raw, held_in or raw, strict=True)
    return [of_layer(layer, buffer, whole) for layer, (buffer, whole) in enumerate(pairs)]


def key_value_probes(pool: Any, read: ReadRows = by_token) -> list[ByteProbe]:
    """Probes of each layer's keys and values."""
    return [*layer_probes("k", pool.k_buffer, read), *layer_probes("v", pool.v_buffer, read)]


def _plain(**options: Any) -> Built:
    pool, allocator = mha(**options)
    return Built(pool, allocator, key_value_probes(pool))


def _shrunk() -> Built:
    """Builds a pool that SGLang has backed with less memory than it laid out addresses for."""
    pool, _ = mha(size=256)
    pool.size = 192
    allocator = scattered(allocator_for(pool, pool.size, 16, torch.bfloat16))
    return Built(pool, allocator, key_value_probes(pool))


def _shared(rank: int, world: int) -> Built:
    """Builds the pool of a rank that shares contexts with others: it has every `world`-th token."""
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(attn_dcp_size=world, attn_dcp_rank=rank))
        pool, allocator = mha(4, world=world)

        def read(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return buffer[slots[slots % world == rank] // world]

        return Built(pool, allocator, key_value_probes(pool, read), undo=stack.pop_all().close)


def _hnd() -> Built:
    with environment(SGLANG_USE_HND_KVCACHE="1"):
        pool, allocator = mha(widths=(24, 16))
    return Built(pool, allocator, key_value_probes(pool, by_head(16)))


def _vectorized(size: int, *, in_order: bool = False) -> Built:
    """ROCm's layout: keys [page, head, part, token, x], values [page, head, part, head_dim, x].

    SGLang alone fails loudly when a slot is more than the pages, so `in_order` keeps slots low.
    """
    was_rocm = memory_pool._use_aiter
    memory_pool._use_aiter = True
    try:
        with environment(SGLANG_AITER_KV_CACHE_LAYOUT="vectorized_5d"):
            pool, allocator = mha(widths=(24, 16), size=size)
    finally:
        memory_pool._use_aiter = was_rocm
    if in_order:
        allocator.clear()
    x = pool.v_buffer[0].shape[-1]

    def keys(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return buffer[slots // 16, :, :, slots % 16]

    def values(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return buffer[slots // 16, :, slots % 16 // x, :, slots % x]

    probes = [*layer_probes("k", pool.k_buffer, keys), *layer_probes("v", pool.v_buffer, values)]
    return Built(pool, allocator, probes)


def _keys_only() -> Built:
    pool = memory_pool.MHATokenToKOnlyPool(
        size=256,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=16,
        layer_num=2,
        **ON_CPU,
    )
    allocator = scattered(allocator_for(pool, 256, 16, torch.bfloat16))
    return Built(pool, allocator, layer_probes("k", pool.k_buffer))


def _minimax(keys_only: Sequence[int], index_dtype: torch.dtype | None = None) -> Built:
    """Builds four layers of a later stage, the first without an indexer."""
    pool = memory_pool.MiniMaxSparseKVPool(
        size=256,
        page_size=16,
        dtype=torch.bfloat16,
        index_dtype=index_dtype,
        head_num=2,
        head_dim=16,
        idx_head_dim=8,
        dense_layer_ids=[0, 3],
        sparse_layer_ids=[1, 2, 4, 5, 6],
        disable_value_sparse_layer_ids=keys_only,
        start_layer=3,
        end_layer=7,
        **ON_CPU,
    )
    probes = key_value_probes(pool.main_pool)
    if pool.index_kv_pool is not None:
        probes += layer_probes("index_k", pool.index_kv_pool.k_buffer)
        probes += layer_probes("index_v", pool.index_kv_pool.v_buffer)
    if pool.index_k_pool is not None:
        probes += layer_probes("index_key_only", pool.index_k_pool.k_buffer)
    return Built(pool, scattered(allocator_for(pool, 256, 16, torch.bfloat16)), probes)


_BY_SLOT = "its copy takes a slot for the row of a tensor whose rows are pages"
_NO_COPY = "the class has no copy"

CASES = [
    Case("MHA, page 1", lambda: _plain(page_size=1), "exact", 13, 1),
    Case("MHA, page 16, partial last page", _plain, "exact"),
    Case("MHA fp8", lambda: _plain(dtype=torch.float8_e4m3fn), "exact"),
    Case(
        "MHA of a later pipeline stage, keys wider than values",
        lambda: _plain(widths=(24, 16), start_layer=5, end_layer=7),
        "exact",
    ),
    Case("MHA of a size that isn't whole pages", lambda: _plain(size=250), "exact"),
    Case("MHA that serves less than it was laid out for", _shrunk, "exact"),
    Case(
        "MHA, one of three ranks that share contexts",
        lambda: _shared(1, 3),
        "crash",
        38,
        12,
        "its copy takes the slots of all ranks for rows of this one",
    ),
    Case("MHA, HND", _hnd, "crash", reason="its copy refuses this layout by an assertion"),
    Case("MHA, vectorized_5d", lambda: _vectorized(256), "crash", reason=_BY_SLOT, only_on="ROCm"),
    Case(
        "MHA, vectorized_5d, more pages than slots in use",
        lambda: _vectorized(1280, in_order=True),
        "wrong",
        5,
        reason=_BY_SLOT,
        only_on="ROCm",
    ),
    Case("keys alone", _keys_only, "crash", reason=_NO_COPY),
    Case("MiniMax, indexers with values", lambda: _minimax(()), "crash", reason=_NO_COPY),
    Case(
        "MiniMax, indexers of both kinds, fp8 index",
        lambda: _minimax((4, 6), torch.float8_e4m3fn),
        "crash",
        reason=_NO_COPY,
    ),
]
