"""Pools of draft models beside their targets' to make round trips with."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.layout import fused_draft
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_draft_pool import (
    UnifiedDraftKVPool,
    UnifiedDraftMambaPool,
    UnifiedDraftSWAKVPool,
)

from kvtide.plugin.sglang.cases import recurrent_state, sliding_window, unified_memory
from kvtide.plugin.sglang.cases.keys_values import (
    ON_CPU,
    allocator_for,
    key_value_probes,
    mha,
    scattered,
)
from kvtide.plugin.sglang.cases.latent import last_first
from kvtide.plugin.sglang.cases.recurrent_state import SOURCES, TARGETS
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, token_rows
from kvtide.plugin.sglang.cases.unified_memory import (
    buffers,
    state_by_table,
    tokens_by_table,
)

NOT_COPIED = "only the pool of the allocator is copied, and the draft model's isn't it"


def _draft_mha(size: int = 512, **options: Any) -> tuple[Any, list[ByteProbe]]:
    """Makes a draft model's pool of one head and one layer, for the target's allocator."""
    pool = memory_pool.MHATokenToKVPool(
        size=size,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        layer_num=1,
        **ON_CPU,
        **options,
    )
    probes = [token_rows("draft.k", pool.k_buffer[0]), token_rows("draft.v", pool.v_buffer[0])]
    return pool, probes


def _both_mha() -> Built:
    pool, allocator = mha(size=512)
    first, probes = _draft_mha()
    second, more = _draft_mha(size=1024, start_layer=3)
    all_probes = [*key_value_probes(pool), *probes, *more]
    return Built(pool, allocator, all_probes, draft_pools=[first, second])


def _mla_target() -> Built:
    pool = memory_pool.MLATokenToKVPool(
        size=512, page_size=16, dtype=torch.bfloat16, layer_num=3, **sliding_window.LATENT
    )
    draft, probes = _draft_mha()
    latents = [token_rows(f"latent{layer}", buffer) for layer, buffer in enumerate(pool.kv_buffer)]
    allocator = last_first(scattered(allocator_for(pool, 512, 16, torch.bfloat16)))
    return Built(pool, allocator, [*latents, *probes], draft_pools=[draft])


def _beside_state() -> Built:
    """Builds a hybrid target, and a draft of one layer whose pool also has the target's state."""
    state = recurrent_state.state_pool()
    pool, allocator = recurrent_state.hybrid(state)
    draft = memory_pool.HybridLinearKVPool(
        size=512,
        dtype=torch.bfloat16,
        page_size=16,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=[0],
        device="cpu",
        mamba_pool=state,
    )
    probes = [
        *key_value_probes(pool.full_kv_pool),
        *recurrent_state.state_probes(state),
        *key_value_probes(draft.full_kv_pool),
    ]
    return Built(pool, allocator, probes, SOURCES, TARGETS, draft_pools=[draft])


def _state_of_its_own() -> Built:
    """Builds a draft model with state, whose rows have the same numbers as the target's rows."""
    state, draft_state = recurrent_state.state_pool(), recurrent_state.state_pool()
    pool, allocator = recurrent_state.hybrid(state)
    draft, probes = _draft_mha()
    probes = [
        *key_value_probes(pool.full_kv_pool),
        *recurrent_state.state_probes(state),
        *probes,
        *recurrent_state.state_probes(draft_state),
    ]
    return Built(pool, allocator, probes, SOURCES, TARGETS, draft_pools=[draft, draft_state])


def _windows() -> Built:
    """Builds a draft with windows whose rows are its slots; the target maps slots to rows."""
    pool = sliding_window.window_pool(16)
    draft = SWAKVPool(
        size=512,
        size_swa=512,
        page_size=16,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=8,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
    )
    draft.register_mapping(torch.arange(512 + 16 + 1))
    allocator = sliding_window.allocator_of(pool, 16)
    probes = [*sliding_window.window_probes(pool), *sliding_window.window_probes(draft)]
    return Built(
        pool,
        allocator,
        probes,
        allocate=lambda count: sliding_window.extend(allocator, count),
        draft_pools=[draft],
    )


DENSE = fused_draft.DenseDraftRegion(
    lane_num=3, head_num=1, head_dim=16, v_head_dim=8, store_dtype=torch.bfloat16
)


def _placed(**counts: tuple[int, ...]) -> Any:
    """Places draft layers of two runners in pools: `counts` has both numbers of layers by pool."""
    params = recurrent_state.state_params()
    state = fused_draft.DraftStateGeometry(
        conv_state_shapes=((8, 3),),
        conv_dtype=params.dtype.conv,
        temporal_state_shape=(1, 8, 8),
        temporal_dtype=params.dtype.temporal,
    )
    regions = {
        host: fused_draft.DraftStateRegion(lane_num=3, state=state) if host == "mamba" else DENSE
        for host in counts
    }
    return fused_draft.FusedDraftPlacement.from_counts(counts=counts, regions=regions)


def _fused_hybrid() -> Built:
    """Builds drafts of one layer and of two in the entries of a hybrid target's two pools."""
    built = unified_memory.hybrid(fused_draft=_placed(full=(1, 2), mamba=(1, 2)))
    shared, host = built.allocator.unified_buffer, built.allocator
    lanes = ({0: 0}, {0: 1, 1: 2})
    pools = [
        UnifiedDraftKVPool(
            unified_buffer=shared,
            host_sub_pool_name="full",
            host_allocator=host,
            layer_lanes=lane,
            page_size=16,
        )
        for lane in lanes
    ]
    states = [
        UnifiedDraftMambaPool(unified_buffer=shared, sub_pool_name="mamba", layer_lanes=lane)
        for lane in lanes
    ]
    raw, probes = shared._raw, list(built.probes)
    for pool in pools:
        probes += [
            tokens_by_table(f"draft.{name}", buffer, host.full_attn_allocator, raw)
            for name, buffer in buffers(pool)
        ]
    for state in states:
        probes += state_by_table(state, host.mamba_allocator, raw)
    built.probes, built.draft_pools = probes, [*pools, *states]
    return built


def _fused_windows() -> Built:
    """Builds a draft with a full layer and a window layer, in entries of the target's pools."""
    bundle = unified_memory.window_bundle(fused_draft=_placed(full=(1, 2), swa=(1, 2)))
    built = unified_memory.windows(bundle, gone=16, window=37 - 16)
    draft = UnifiedDraftSWAKVPool(
        unified_buffer=bundle.unified_memory_pool,
        host_allocator=built.allocator,
        page_size=16,
        full_layer_lanes={0: 0},
        swa_layer_lanes={1: 0},
    )
    raw = bundle.unified_memory_pool._raw
    sides = (
        (draft.full_kv_pool, built.allocator.full_attn_allocator, 0),
        (draft.swa_kv_pool, built.allocator.swa_attn_allocator, 16),
    )
    more = [
        tokens_by_table(f"draft.{name}", buffer, owner, raw, gone)
        for side, owner, gone in sides
        for name, buffer in buffers(side)
    ]
    built.probes, built.draft_pools = [*built.probes, *more], [draft]
    return built


CASES = [
    Case("MHA, two MHA drafts", _both_mha, "wrong", reason=NOT_COPIED),
    Case("MLA, MHA draft", _mla_target, "wrong", reason=NOT_COPIED),
    Case("state, a draft that shares it", _beside_state, "wrong", reason=NOT_COPIED),
    Case("state, a draft with its own", _state_of_its_own, "wrong", reason=NOT_COPIED),
    Case("SWA, a draft with windows", _windows, "wrong", reason=NOT_COPIED),
    Case("drafts in unified MHA and state", _fused_hybrid, "wrong", reason=NOT_COPIED),
    Case("a draft in unified SWA", _fused_windows, "wrong", reason=NOT_COPIED),
]
