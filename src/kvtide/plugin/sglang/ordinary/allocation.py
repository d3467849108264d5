"""Acquires slots for a request that comes back.

It gets a row, slots for its tokens and its compressed keys, and a recurrent state, if it has these.
In layers with a sliding window it gets slots for its last tokens only: as many as SGLang leaves a
running request, so that the request has the same slots after its return as before.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtide.plugin.reader import Table
from kvtide.plugin.sglang.rules import LastTokens

READS: Table = {
    "Scheduler": (
        *("token_to_kv_pool_allocator", "req_to_token_pool", "tree_cache", "page_size"),
        *("is_hybrid_swa", "sliding_window_size?"),
    ),
    "ReqToTokenPool": ("available_size", "alloc", "write", "alloc_aux_to_lengths"),
    "ReqKvInfo": ("req_pool_idx", "kv_committed_len", "kv_allocated_len", "mamba_needs_clear"),
    "SWATokenToKVPoolAllocator": (
        *("full_attn_allocator", "swa_attn_allocator", "full_available_size", "swa_available_size"),
        *("set_full_to_swa_mapping", "clear_full_to_swa_mapping", "alloc_extend_swa_tail"),
    ),
    "BasePrefixCache": ("supports_prefix_sharing", "evict_for_alloc"),
}
"""`coverage` checks for these when the server starts."""


def window_tokens(window: int | None, page_size: int, *, is_shared: bool) -> int | None:
    """How many of a request's last tokens, from the beginning of a page, have slots in a window.

    SGLang frees none of these slots while the request runs. If prefixes are shared it is at least a
    page: at the request's end the last page in the prefix cache must have slots.
    """
    if window is None or not is_shared:
        return window
    return max(window, page_size)


def longest_window_slots(scheduler: Any) -> int:
    """The most slots that a request takes in a layer with a window when it comes back."""
    return _whole_pages(scheduler, _longest_window(scheduler) or 0)


def take_slots(scheduler: Any, req: Any) -> bool:
    """Gives the request a row, and slots for all its tokens with KV. False if too few are free.

    Compressed keys get slots as in a forward pass that ends with these tokens. So the next step
    finds them and makes only new ones.
    """
    from sglang.srt.mem_cache.allocation import ensure_mamba_capacity

    rows, token_count = scheduler.req_to_token_pool, req.seqlen - 1
    if rows.available_size() < 1 or not ensure_mamba_capacity(rows, [req], scheduler.tree_cache):
        return False
    kept = _kept_tokens(scheduler, token_count)
    slots = _slots(scheduler, token_count, kept)
    if slots is None:
        return False
    rows.alloc([req])
    # A recurrent state will be restored, so the next forward pass must not clear it.
    req.kv.mamba_needs_clear = False
    rows.write((req.kv.req_pool_idx, slice(0, token_count)), slots[:token_count])
    req.kv.kv_committed_len = req.kv.kv_allocated_len = token_count
    if kept < token_count:
        _note_evicted(req, token_count - kept)
    req.extend_end = token_count
    try:
        rows.alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx]),
            target_seq_lens_cpu=torch.tensor([token_count]),
        )
    except RuntimeError:  # too few slots for compressed keys are free; none was taken
        give_slots_back(scheduler, req)
        return False
    return True


def give_slots_back(scheduler: Any, req: Any) -> None:
    """Undoes `take_slots`: the request waits without KV, as SGLang left it."""
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.kv.kv_committed_len = 0
    req.extend_end = None


def _longest_window(scheduler: Any) -> int | None:
    is_shared = scheduler.tree_cache.supports_prefix_sharing()
    return window_tokens(scheduler.sliding_window_size, scheduler.page_size, is_shared=is_shared)


def _kept_tokens(scheduler: Any, token_count: int) -> int:
    """How many of `token_count` tokens, counted from the end, have slots in every layer."""
    count = _longest_window(scheduler) if scheduler.is_hybrid_swa else None
    if count is None:
        return token_count
    return token_count - LastTokens(count, scheduler.page_size).first(token_count)


def _whole_pages(scheduler: Any, token_count: int) -> int:
    """The slots of the pages that `token_count` tokens need."""
    page_size: int = scheduler.page_size
    return -(-token_count // page_size) * page_size


def _slots(scheduler: Any, token_count: int, kept: int) -> torch.Tensor | None:
    """New slots for `token_count` tokens, the last `kept` of them in every layer.

    None if too few are free, even after the prefix cache has evicted what it can.
    """
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    size = _whole_pages(scheduler, token_count)
    slots: torch.Tensor | None
    if not scheduler.is_hybrid_swa:
        evict_from_tree_cache(tree, size)
        slots = allocator.alloc(size)
        return slots
    _make_room(allocator, tree, size, _whole_pages(scheduler, kept))
    slots = (_paged if scheduler.page_size > 1 else _single)(allocator, token_count, kept)
    return slots


def _make_room(allocator: Any, tree: Any, full_size: int, window_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    full = max(0, full_size - allocator.full_available_size())
    window = max(0, window_size - allocator.swa_available_size())
    if (full or window) and tree.supports_prefix_sharing():
        tree.evict_for_alloc(EvictParams(num_tokens=full, swa_num_tokens=window))


def _paged(allocator: Any, token_count: int, kept: int) -> torch.Tensor | None:
    def on(device: Any, number: int) -> torch.Tensor:
        return torch.tensor([number], dtype=torch.int64, device=device)

    slots: torch.Tensor | None = allocator.alloc_extend_swa_tail(
        prefix_lens=on(allocator.device, 0),
        prefix_lens_cpu=on("cpu", 0),
        seq_lens=on(allocator.device, token_count),
        seq_lens_cpu=on("cpu", token_count),
        last_loc=on(allocator.device, -1),
        extend_num_tokens=token_count,
        swa_tail_len=kept,
    )
    return slots


def _single(allocator: Any, token_count: int, kept: int) -> torch.Tensor | None:
    """Like `_paged`, for pages of a single slot, for which SGLang has no such function."""
    if allocator.full_available_size() < token_count or allocator.swa_available_size() < kept:
        return None
    slots: torch.Tensor = allocator.full_attn_allocator.alloc(token_count)
    first = token_count - kept
    allocator.set_full_to_swa_mapping(slots[first:], allocator.swa_attn_allocator.alloc(kept))
    allocator.clear_full_to_swa_mapping(slots[:first])
    return slots


def _note_evicted(req: Any, token_count: int) -> None:
    """Tells SGLang that the first tokens have no slots in a window."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    req.kv.set_evicted_seqlen(ComponentType.SWA, token_count)
