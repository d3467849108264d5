"""Pools of keys and values that kvtide refuses, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseMHAMainPool
from sglang.srt.mem_cache.page_interleave_pool import PageInterleaveMHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.cases.keys_values import ON_CPU, environment, mha
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject

SIZES: dict[str, Any] = {
    "size": 64,
    "page_size": 16,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 16,
    "layer_num": 2,
    **ON_CPU,
}


def test_a_pool_that_holds_nothing_is_refused() -> None:
    """It has one page in place of all, and slots beyond it don't exist."""
    pool = memory_pool.NoOpMHATokenToKVPool(**SIZES)
    with pytest.raises(Refused, match="NoOpMHATokenToKVPool: it holds no keys"):
        describe(Subject(pool))


def test_a_pool_whose_tokens_are_on_the_host_is_refused() -> None:
    """HiSparse's main pool is a cache of host memory, which can't be reached from the pool."""
    with pytest.raises(Refused, match=r"HiSparseMHAMainPool: .* host memory"):
        describe(Subject(HiSparseMHAMainPool(**SIZES)))


def test_a_pool_with_such_a_part_is_refused_for_that_part() -> None:
    """MiniMax under HiSparse: a request can't come back with its index keys only."""
    pool = memory_pool.MiniMaxSparseKVPool(
        **{name: value for name, value in SIZES.items() if name != "layer_num"},
        idx_head_dim=16,
        dense_layer_ids=[0],
        sparse_layer_ids=[1],
        start_layer=0,
        end_layer=2,
        enable_hisparse=True,
    )
    with pytest.raises(Refused, match="HiSparseMHAMainPool"):
        describe(Subject(pool))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (memory_pool.PageMajorMHATokenToKVPool, "can't make such a pool"),
        (PageInterleaveMHATokenToKVPool, "may then belong on another"),
    ],
)
def test_a_pool_of_servers_without_retraction_is_refused(kind: Any, reason: str) -> None:
    """The class decides: such a pool can't be made here, so its attributes aren't read."""
    with pytest.raises(Refused, match=f"{kind.__name__}: .*{reason}"):
        describe(Subject(object.__new__(kind)))


def test_page_major_pools_still_cannot_be_made() -> None:
    """If this fails, the reason above is no longer true."""
    with pytest.raises(NotImplementedError):
        memory_pool.PageMajorMHATokenToKVPool(**SIZES)


def test_an_unknown_layout_is_refused() -> None:
    """Only its label says how the bytes are ordered."""
    pool, allocator = mha()
    pool.kv_cache_layout = "spiral"
    with pytest.raises(Refused, match="layout 'spiral'"):
        describe(Subject(pool, allocator))


def test_scales_that_two_requests_may_share_are_refused() -> None:
    """NVFP4's native scales of 16 tokens are together, but requests get pages of 8."""
    method = get_kv_cache_quant_method(
        "nvfp4", num_layers=3, device="cpu", page_size=16, native_scale_layout=True
    )
    pool, allocator = mha(8, size=248, widths=(64, 64), quant_method=method)
    with pytest.raises(Refused, match="'k_native_scale' keeps 16 tokens together, but pages of 8"):
        describe(Subject(pool, allocator))


def test_pages_that_ranks_would_have_to_share_are_refused() -> None:
    """Ranks that share contexts write whole rows, not parts of pages."""
    with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=0):
        with environment(SGLANG_USE_HND_KVCACHE="1"):
            pool, allocator = mha(world=2)
        with pytest.raises(Refused, match=r"dcp-size 2.*one rank's share"):
            describe(Subject(pool, allocator))


def test_a_pool_of_neither_a_share_nor_all_slots_is_refused() -> None:
    """Ranks share contexts, but the allocator doesn't know it."""
    with get_parallel().override(attn_dcp_size=3, attn_dcp_rank=0):
        pool, allocator = mha(16)
        with pytest.raises(Refused, match="neither a rank's share of the allocator's 16 nor all"):
            describe(Subject(pool, allocator))


def test_a_draft_pool_of_ranks_that_share_contexts_has_all_slots() -> None:
    """Its pages are as wide as the allocator's."""
    with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=1):
        pool, allocator = mha(16)
        description = describe(Subject(pool, allocator))
    assert (272, 0) == (description.slot_count, description.rank)
