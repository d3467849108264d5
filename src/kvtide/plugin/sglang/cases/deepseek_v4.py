"""Pools of DeepSeek-V4 to make round trips with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4

from kvtide.plugin.sglang.cases.deepseek_v4_server import (
    PAGE,
    RATIOS,
    REQUESTS,
    SLOTS,
    WINDOW,
    Server,
    Slots,
    npu_modules,
    pool_of,
)
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, OnlyOn, Refusal

TOKENS = 3 * PAGE + 77
Locate = Callable[[torch.Tensor], torch.Tensor]
"""Leads from slots to entries of a buffer, int64 [entry]."""


def compressed(ratio: int) -> Locate:
    """Leads to complete entries; the slot of an entry's last token says where it is."""
    return lambda slots: slots[(slots + 1) % ratio == 0] // ratio


def in_window(pool: Any, dead: torch.Tensor) -> Locate:
    """Leads to the entries of tokens that are still in the window."""

    def locate(slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = pool.full_to_swa_index_mapping[slots[~dead[slots]]]
        return found[found > 0]

    return locate


def of_layers(
    name: str, buffers: list[torch.Tensor], read: Callable[..., torch.Tensor]
) -> list[ByteProbe]:
    """A probe for each layer; `read` takes its buffer, the slots, and the request's rows."""

    def bound(buffer: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda slots, rows: read(buffer, slots, rows)

    return [
        ByteProbe(f"{name}{layer}", bound(buffer), [buffer]) for layer, buffer in enumerate(buffers)
    ]


def paged(
    name: str,
    buffers: list[torch.Tensor],
    page: int,
    fields: list[tuple[int, int, int]],
    locate: Locate,
) -> list[ByteProbe]:
    """Reads entries in pages. A field is (its bytes, its first byte, distance of the entries)."""

    def read(buffer: torch.Tensor, slots: torch.Tensor, _: Mapping[str, int]) -> torch.Tensor:
        entries, raw = locate(slots), buffer.view(torch.uint8)
        pages, places = (entries // page).unsqueeze(1), (entries % page).unsqueeze(1)
        columns = [base + places * step + torch.arange(width) for width, base, step in fields]
        return raw[pages, torch.cat(columns, 1)]

    return of_layers(name, buffers, read)


def packed(name: str, pool: Any, locate: Locate) -> list[ByteProbe]:
    """A cache in one of FlashMLA's formats: data, and scales beside them or behind all data."""
    layout, page = pool.kv_layout, pool.page_size
    if type(pool) is v4.DeepSeekV4UniformFP8KVPool:
        return paged(name, pool.kv_buffer, page, [(512, 0, 512)], locate)
    step, base, scale_step = layout.row_addressing(page)
    fields = [(layout.data_bytes, 0, step), (layout.scale_bytes, base, scale_step)]
    return paged(name, pool.kv_buffer, page, fields, locate)


def index_keys(name: str, pool: Any, locate: Locate) -> list[ByteProbe]:
    """Reads the indexer's keys of 128 numbers; a page's scales are behind all of its keys."""
    page, width = pool.page_size, 64 if pool.use_fp4_indexer else 128
    if not pool.uses_aiter_fp4_layout:
        buffers, fields = pool.index_k_with_scale_buffer, [(width, 0, width), (4, page * width, 4)]
        return paged(name, buffers, page, fields, locate)

    def keys(buffer: torch.Tensor, slots: torch.Tensor, _: Mapping[str, int]) -> torch.Tensor:
        entries, raw = locate(slots), buffer.view(torch.uint8)
        return raw[entries // page, 0, :, entries % page]

    return [
        *of_layers(name, pool.index_k_payload_buffer, keys),
        *of_layers(f"{name} scale ", pool.index_k_scale_buffer, keys),
    ]


def own_rows(name: str, buffers: list[torch.Tensor], count: int, last: int) -> list[ByteProbe]:
    """The `last` tokens of a ring of `count` rows a request."""
    places = torch.arange(TOKENS - last, TOKENS) % count

    def read(buffer: torch.Tensor, _: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        return buffer[rows["request"] * count + places]

    return of_layers(name, buffers, read)


def states(pool: Any, dead: torch.Tensor) -> list[ByteProbe]:
    """Probes of the compressors: rings of pages, which tokens lead to, or rings of requests."""
    probes: list[ByteProbe] = []
    kinds = {"state": pool.compress_state_pools, "index state": pool.indexer_compress_state_pools}
    for kind, pools in kinds.items():
        for layer, state in enumerate(pools):
            if state is None:
                continue
            buffer, ring = state.kv_score_buffer.kv_score, state.ring_size
            name, locate = f"{layer}: c{state.ratio} {kind} ", in_window(pool, dead)

            def read(
                buffer: torch.Tensor,
                slots: torch.Tensor,
                _: Any,
                ring: int = ring,
                locate: Locate = locate,
            ) -> torch.Tensor:
                entries = locate(slots)
                return buffer[entries // PAGE * ring + entries % ring]

            if state.ratio == 4 and not pool._unified_kv:
                probes += of_layers(name, [buffer], read)
            else:
                probes += own_rows(name, [buffer], ring, ring)
    return probes


def window(pool: Any, dead: torch.Tensor) -> list[ByteProbe]:
    """The main cache: by page, or in a ring of the request."""
    if pool.request_window is not None:
        ring = pool.request_window
        return [
            *_packed_ring("swa", ring.state, ring.capacity),
            *own_rows("tags", list(ring.tags), ring.capacity, WINDOW),
        ]
    if pool.swa_req_ring_size is not None:
        return _packed_ring("swa", pool.swa_kv_pool, pool.swa_req_ring_size)
    return packed("swa", pool.swa_kv_pool, in_window(pool, dead))


def _packed_ring(name: str, pool: Any, count: int) -> list[ByteProbe]:
    layout, page = pool.kv_layout, pool.page_size
    step, base, scale_step = layout.row_addressing(page)
    last = torch.arange(TOKENS - WINDOW, TOKENS) % count

    def read(buffer: torch.Tensor, _: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        entries = rows["request"] * count + last
        pages, places = (entries // page).unsqueeze(1), (entries % page).unsqueeze(1)
        data = places * step + torch.arange(layout.data_bytes)
        scales = base + places * scale_step + torch.arange(layout.scale_bytes)
        return buffer[pages, torch.cat([data, scales], 1)]

    return of_layers(name, pool.kv_buffer, read)


def _built(server: Server | None = None, **options: Any) -> Built:
    """Builds a pool as SGLang has it on a GPU."""
    return _with(*_served(server or Server(), **options))


def _served(server: Server, **options: Any) -> tuple[Any, Slots, list[ByteProbe]]:
    pool = pool_of(server, **options)
    slots = Slots(pool, TOKENS)
    probes = [*window(pool, slots.dead), *states(pool, slots.dead)]
    for ratio, inner in pool.kv_pools.items():
        probes += packed(f"c{ratio} ", inner, compressed(ratio))
    for ratio, index in pool.index_pools.items():
        probes += index_keys(f"c{ratio} index ", index, compressed(ratio))
    if pool.swa_valid_from is not None:
        probes += own_rows("swa_valid_from", [pool.swa_valid_from], 1, 1)
    return pool, slots, probes


def _unified(*, fp8: bool) -> Built:
    """Builds a pool as on ROCm: a layer's buffer has the window's rings, then the entries."""
    server = Server(is_rocm=True, unified=True)
    pool = pool_of(server, unified_fp8=fp8)
    slots, inner = Slots(pool, TOKENS), pool.unified_kv_pool
    probes = states(pool, slots.dead)
    for layers in (inner.kv_buffer, inner.kv_buffer_rope) if fp8 else (inner.kv_buffer,):
        probes += own_rows("swa", layers, inner.swa_ring_size, WINDOW)
        for ratio in (4, 128):
            compressed_layers = [
                layer
                for layer, layer_ratio in zip(layers, RATIOS, strict=True)
                if layer_ratio == ratio
            ]
            locate, first = compressed(ratio), inner.swa_pages

            def read(
                buffer: torch.Tensor,
                slots: torch.Tensor,
                _: Any,
                locate: Locate = locate,
                first: int = first,
            ) -> torch.Tensor:
                return buffer[first + locate(slots)]

            probes += of_layers(f"c{ratio} ", compressed_layers, read)
    probes += index_keys("c4 index ", pool.index_pools[4], compressed(4))
    return _with(pool, slots, probes)


def _npu(*, is_a5: bool) -> Built:
    """Builds a pool as on an NPU: each entry is a row, and C128 has separate pages."""
    with npu_modules():
        from sglang.srt.hardware_backend.npu.dsv4 import (
            dsv4_memory_pool,
            dsv4_req_to_token_pool,
        )
    schedule = mock.Mock(c128_page_size=16)
    with (
        mock.patch.object(dsv4_memory_pool, "get_schedule", return_value=schedule),
        mock.patch.object(dsv4_req_to_token_pool, "get_schedule", return_value=schedule),
        mock.patch.object(dsv4_memory_pool, "is_npu_arch35", return_value=is_a5),
    ):
        kind = dsv4_memory_pool.DSV4NPUTokenToKVPool
        pool = pool_of(Server(), kind, dtype=torch.bfloat16, c128_size=64)
        requests = dsv4_req_to_token_pool.DSV4NPUReqToTokenPool(REQUESTS, SLOTS, "cpu", False)
    pages = {1: 3, 2: 1}
    for request, page in pages.items():
        requests.req_to_c128_sidecar[request, 0] = page
    slots = Slots(pool, TOKENS)
    built = _with(pool, slots, _npu_probes(pool, slots.dead, requests, is_a5))
    built.request_pool = requests
    return built


def _npu_probes(pool: Any, dead: torch.Tensor, requests: Any, is_a5: bool) -> list[ByteProbe]:
    def entries(name: str, buffers: list[torch.Tensor], locate: Locate) -> list[ByteProbe]:
        return of_layers(
            name, buffers, lambda buffer, slots, _: buffer.flatten(0, 1)[locate(slots)]
        )

    def own_page(buffer: torch.Tensor, _: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
        page = int(requests.req_to_c128_sidecar[rows["request"], 0])
        return buffer[page, : TOKENS // 128].clone()

    index = pool.index_pools[4]
    rings = [state for state in states(pool, dead) if not (is_a5 and "c4" in state.name)]
    for name, pools in (("", pool.compress_state_pools), (" i", pool.indexer_compress_state_pools)):
        tensors = [state.kv_score_buffer.kv_score for state in pools if state and state.ratio == 4]
        rings += own_rows(f"c4{name} state", tensors, 8, 8) if is_a5 else []
    return [
        *rings,
        *entries("swa", pool.swa_kv_pool.kv_buffer, in_window(pool, dead)),
        *entries("c4 ", pool.kv_pools[4].kv_buffer, compressed(4)),
        *entries("index ", index.index_k_buffer, compressed(4)),
        *entries("index scale ", index.index_scale_buffer, compressed(4)),
        *of_layers("c128 ", pool.kv_pools[128].kv_buffer, own_page),
    ]


def _with_draft() -> Built:
    """The draft model's layer has a window alone, in pages that lie where the target's do."""
    server = Server(algorithm="EAGLE")
    pool, slots, probes = _served(server)
    draft = pool_of(server, compression_ratios=[0], is_draft_worker=True)
    draft.register_mapping(pool.full_to_swa_index_mapping)
    probes += packed("draft swa", draft.swa_kv_pool, in_window(draft, slots.dead))
    return replace(_with(pool, slots, probes), draft_pools=[draft])


def _with(pool: Any, slots: Slots, probes: list[ByteProbe]) -> Built:
    return Built(
        pool,
        slots.allocator,
        probes,
        allocate=slots.allocate,
        prepare=slots.leave_window,
    )


def _case(name: str, build: Callable[[], Built], only_on: OnlyOn = "") -> Case:
    reason = "has no copy at all: the prefill server computes the request's KV again"
    return Case(f"DeepSeek-V4{name}", build, "crash", TOKENS, PAGE, reason, only_on)


def _low_ratios(server: Server | None = None, **options: Any) -> Built:
    """V4.1's layers of ratios 1 and 2, whose caches are the source of others' as well."""
    ratios, sources = [0, 1, 2, 1, 2], [1, 2]
    return _built(server, compression_ratios=ratios, kv_source_layers=sources, **options)


CASES = [
    _case("", _built),
    _case(" with drafts", lambda: _built(Server(algorithm="EAGLE"))),
    _case(" with a draft model", _with_draft),
    _case(
        " of a later pipeline stage",
        lambda: _built(start_layer=2, end_layer=5, layer_num=3),
    ),
    _case(", C128's state online", lambda: _built(Server(online=True))),
    _case(" in uniform fp8", lambda: _built(Server(backend="trtllm"))),
    _case(", the window in pages of 64", lambda: _built(Server(is_sm120=True))),
    _case(".1 of ratios 1 and 2", lambda: _low_ratios(kv_layout=KVLayout.V41)),
    _case(".1 in the interleaved layout", lambda: _low_ratios(kv_layout=KVLayout.V41_NEW)),
    _case(
        ".1, the window by request", lambda: _low_ratios(Server(replay=True, algorithm="DSPARK"))
    ),
    _case(
        ".1's draft, its window in a ring",
        lambda: _built(
            Server(replay=True, algorithm="DSPARK"),
            compression_ratios=[0, 0],
            is_draft_worker=True,
            online_mtp_max_draft_tokens=4,
        ),
    ),
    _case(
        " on ROCm, index keys in fp4",
        lambda: _built(Server(is_rocm=True, fp4_index=True)),
        "ROCm",
    ),
    _case(" on ROCm, unified", lambda: _unified(fp8=False), "ROCm"),
    _case(" on ROCm, unified in fp8", lambda: _unified(fp8=True), "ROCm"),
    _case(" on an NPU", lambda: _npu(is_a5=False), "NPU"),
    _case(" on an A5", lambda: _npu(is_a5=True), "NPU"),
]

REFUSED = [
    Refusal(
        "DeepSeek-V4 with HiSparse",
        lambda: _built(enable_hisparse=True),
        "HiSparse keeps a request's C4 entries in host memory",
    ),
    Refusal(
        "DeepSeek-V4, C128's state online, with drafts",
        lambda: _built(
            Server(algorithm="EAGLE", online=True, online_drafts=True),
            online_mtp_max_draft_tokens=4,
        ),
        "lacks the drafts accepted last",
    ),
]
