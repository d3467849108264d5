"""Slots for a request that comes back to an ordinary server, by SGLang's own allocators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvtide.plugin.sglang.cases.recurrent_state import state_params
from kvtide.plugin.sglang.cases.sliding_window import allocator_of, extend, window_pool
from kvtide.plugin.sglang.ordinary.allocation import longest_window_slots, take_slots

WINDOW = 20


class Tree:
    """A prefix cache that records how much it was asked to evict."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.asked: list[tuple[int, int]] = []

    def supports_prefix_sharing(self) -> bool:
        """Returns whether requests share prefixes."""
        return self.is_shared

    def supports_mamba(self) -> bool:
        """Returns False: the cache holds no states."""
        return False

    def evict_for_alloc(self, params: Any) -> None:
        """Records the call; nothing is freed."""
        self.asked.append((params.num_tokens, params.swa_num_tokens))


def scheduler(page_size: int, *, is_shared: bool = False) -> Any:
    """Makes a scheduler with windows of 20 tokens: 512 slots, 256 of them for a window's layers."""
    rows = ReqToTokenPool(size=2, max_context_len=600, device="cpu", enable_memory_saver=False)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator_of(window_pool(page_size), page_size),
        req_to_token_pool=rows,
        tree_cache=Tree(is_shared=is_shared),
        page_size=page_size,
        is_hybrid_swa=True,
        sliding_window_size=WINDOW,
    )


def request(token_count: int) -> Any:
    """Makes a request with `token_count` tokens that have KV, and one that has none yet."""
    return SimpleNamespace(
        rid="one", seqlen=token_count + 1, kv=ReqKvInfo(), extend_end=None, is_dllm=lambda: False
    )


def free(on: Any) -> tuple[int, int, int]:
    """Returns the free slots of both kinds, and the free rows."""
    allocator = on.token_to_kv_pool_allocator
    slots = allocator.full_available_size(), allocator.swa_available_size()
    return (*slots, on.req_to_token_pool.available_size())


@pytest.mark.parametrize(
    ("page_size", "is_shared", "kept"),
    [(1, False, 20), (1, True, 20), (4, False, 20 + 2), (64, False, 50), (64, True, 50 + 64)],
)
def test_the_last_tokens_have_slots_in_each_layer(
    page_size: int, is_shared: bool, kept: int
) -> None:
    """The slots begin with a page, and there is at least a page if prefixes are shared."""
    on, req = scheduler(page_size, is_shared=is_shared), request(178)
    before = free(on)
    assert take_slots(on, req)
    slots = on.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :178].long()
    mapping = on.token_to_kv_pool_allocator.full_to_swa_index_mapping
    assert [False] * (178 - kept) + [True] * kept == (mapping[slots] > 0).tolist()
    assert (178, kept) == (slots.unique().numel(), mapping[slots[-kept:]].unique().numel())
    assert 178 - kept == req.kv.get_evicted_seqlen(ComponentType.SWA)
    assert (178, 178) == (req.kv.kv_committed_len, req.kv.kv_allocated_len)
    pages, window_pages = -(-178 // page_size), -(-kept // page_size)
    taken = pages * page_size, window_pages * page_size, 1
    assert taken == tuple(count - other for count, other in zip(before, free(on), strict=True))
    assert kept <= longest_window_slots(on) + page_size


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("lacking", ["full", "window", "row"])
def test_without_room_nothing_is_taken(page_size: int, lacking: str) -> None:
    """The prefix cache was asked only for what is missing."""
    on = scheduler(page_size, is_shared=True)
    allocator = on.token_to_kv_pool_allocator
    if lacking == "full":
        allocator.full_attn_allocator.alloc(400)
    elif lacking == "window":
        allocator.swa_attn_allocator.alloc(244)
    else:
        on.req_to_token_pool.alloc([request(1), request(1)])
    before = free(on)
    assert not take_slots(on, request(160))
    assert before == free(on)
    expected = {"full": [(160 - before[0], 0)], "window": [(0, 20 - before[1])], "row": []}
    assert expected[lacking] == on.tree_cache.asked


def test_reused_slots_lead_to_no_window() -> None:
    """Slots keep their old entries in the window's map until they are overwritten."""
    on = scheduler(1)
    allocator = on.token_to_kv_pool_allocator
    allocator.full_to_swa_index_mapping[:-1] = 7
    req = request(100)
    assert take_slots(on, req)
    slots = on.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :80].long()
    assert [0] * 80 == allocator.full_to_swa_index_mapping[slots].tolist()


def test_sglang_frees_all_slots_that_were_taken() -> None:
    """SGLang's fields of the request match the slots that it has."""
    from sglang.srt.mem_cache.common import free_kv_row_segments

    for page_size in (1, 4):
        on, req = scheduler(page_size), request(100)
        before = free(on)
        assert take_slots(on, req)
        slots = on.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :100].long()
        gone = req.kv.get_evicted_seqlen(ComponentType.SWA)
        free_kv_row_segments(on.token_to_kv_pool_allocator, [(slots, 0)], swa_evicted_seqlen=gone)
        on.req_to_token_pool.free(req)
        assert before == free(on)


def test_a_recurrent_state_isnt_cleared_by_the_next_step() -> None:
    """If no state is free, the request waits."""
    on, req = scheduler(4), request(40)
    on.req_to_token_pool = HybridReqToTokenPool(
        size=4,
        mamba_size=1,
        mamba_spec_state_size=0,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=state_params(),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=False,
    )
    assert take_slots(on, req)
    assert (True, False) == (req.kv.holds_mamba, req.kv.mamba_needs_clear)
    before = free(on)
    assert not take_slots(on, request(40))
    assert before == free(on)


def test_the_slots_belong_to_no_other_request() -> None:
    """This holds for slots of both kinds."""
    on = scheduler(4)
    mapping = on.token_to_kv_pool_allocator.full_to_swa_index_mapping
    others = extend(on.token_to_kv_pool_allocator, 100)
    theirs = mapping[others].clone()
    req = request(100)
    assert take_slots(on, req)
    slots = on.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :100].long()
    assert not torch.isin(slots, others).any()
    assert not torch.isin(mapping[slots[-20:]], theirs).any()
    assert torch.equal(theirs, mapping[others])
