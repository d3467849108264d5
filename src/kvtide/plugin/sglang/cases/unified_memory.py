"""Pools of unified memory to make round trips with: several in one buffer, looked up in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache import unified_memory_pool

from kvtide.conformance.tensors import randomise
from kvtide.plugin.sglang.cases.latent import shared_context
from kvtide.plugin.sglang.cases.recurrent_state import ALIASED, state_params
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, Refusal

PAGE = 16
VIRTUAL = (
    "the request's slot of state is a virtual one, and used as if it were a row: other requests' "
    "state is copied, and overwritten"
)
COMMON: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 16,
    "v_head_dim": 16,
    "start_layer": 0,
    "end_layer": 5,
    "enable_memory_saver": False,
    "need_sort": False,
}
STATE: dict[str, Any] = {
    "mamba_layer_ids": [0, 2, 4],
    "mamba2_cache_params": state_params(),
    "model_context_len": 128,
    "extra_max_context_len": 4,
    "max_mamba_cache_size": 24,
    "max_num_reqs": 4,
    "enable_mamba_extra_buffer": False,
    "enable_mamba_extra_buffer_lazy": False,
    "speculative_num_draft_tokens": None,
    "disable_overlap_schedule": True,
}


def hybrid_bundle(page_size: int = PAGE, **options: Any) -> Any:
    """Makes unified memory for two layers with attention and three with state."""
    given: dict[str, Any] = {
        "is_draft_worker": False,
        "use_mla_backend": False,
        "full_attention_layer_ids": [1, 3],
        "max_total_num_tokens": 512,
    }
    return unified_memory_pool.init_unified_mamba_pools(
        page_size=page_size, **{**COMMON, **STATE, **given, **options}
    )


WINDOWS: dict[str, Any] = {
    "swa_head_num": 1,
    "swa_head_dim": 32,
    "swa_v_head_dim": 16,
    "full_max_total_num_tokens": 512,
    "swa_max_total_num_tokens": 384,
    "sliding_window_size": 20,
}


def window_bundle(page_size: int = PAGE, **options: Any) -> Any:
    """Makes unified memory for two layers with full attention and three with a window."""
    layers = {"full_attention_layer_ids": [1, 3], "swa_attention_layer_ids": [0, 2, 4]}
    return unified_memory_pool.init_unified_swa_pools(
        page_size=page_size, model_context_len=128, **{**COMMON, **WINDOWS, **layers, **options}
    )


def all_bundle(**options: Any) -> Any:
    """Makes unified memory for a layer with full attention, two with a window, three with state."""
    layers = {"full_attention_layer_ids": [1], "swa_attention_layer_ids": [3, 5]}
    return unified_memory_pool.init_unified_mamba_swa_pools(
        page_size=PAGE, **{**COMMON, **STATE, **WINDOWS, **layers, **options}
    )


def tokens_by_table(
    name: str, view: torch.Tensor, owner: Any, raw: Any, gone: int = 0, rank: int = 0
) -> ByteProbe:
    """A probe of a layer's rows [row, …], which SGLang's table gives to virtual slots.

    It leaves out the first `gone` slots, and the slots of other ranks that share the context.
    """

    def read(slots: torch.Tensor, _: Any) -> torch.Tensor:
        page_size = owner.pool_page_size
        world = owner.page_size // page_size
        held = slots[gone:]
        held = held[held % world == rank] // world
        pages = owner.virtual_to_physical[held // page_size]
        return view[(pages * page_size + held % page_size)[pages > 0]].clone()

    return ByteProbe(name, read, [raw])


def state_by_table(pool: Any, owner: Any, raw: torch.Tensor) -> list[ByteProbe]:
    """Probes of state [layer, row, …], by a request's virtual slot."""

    def read(buffer: torch.Tensor) -> Callable[[torch.Tensor, Mapping[str, int]], torch.Tensor]:
        return lambda _, rows: buffer[:, owner.virtual_to_physical[rows["mamba"]]].clone()

    cache = pool.mamba_cache
    named = [
        *((f"conv{n}", buffer) for n, buffer in enumerate(cache.conv)),
        ("temporal", cache.temporal),
    ]
    return [ByteProbe(name, read(buffer), [raw]) for name, buffer in named]


def buffers(pool: Any) -> list[tuple[str, torch.Tensor]]:
    """The buffers of each layer, with names."""
    if hasattr(pool, "kv_buffer"):
        return [(f"latent{layer}", buffer) for layer, buffer in enumerate(pool.kv_buffer)]
    named = (("k", pool.k_buffer), ("v", pool.v_buffer))
    return [(f"{name}{layer}", buffer) for name, held in named for layer, buffer in enumerate(held)]


def poisoned(raw: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Gives a function that fills all bytes: SGLang zeroes pages when it hands them out."""
    return lambda slots: randomise(raw)


def own_slots(requests: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Allocates virtual slots of state for a source and a target; their rows have other numbers."""
    allocator = requests.mamba_allocator
    taken = [int(allocator.alloc(1)) for _ in range(5)]
    allocator.free(torch.tensor([taken[0], taken[2]]))
    source, target = taken[3], int(allocator.alloc(1))
    return {"request": 1, "mamba": source}, {"request": 3, "mamba": target}


def scatter(allocator: Any) -> None:
    """Allocates and frees slots, so that the next slots have rows of other numbers."""
    first, _, third = (allocator.alloc(count * allocator.page_size) for count in (2, 1, 1))
    allocator.free(first)
    allocator.free(third)


def hybrid(page_size: int = PAGE, rank: int = 0, **options: Any) -> Built:
    """Builds a case from a hybrid_bundle."""
    bundle = hybrid_bundle(page_size, **options)
    pool, allocator = bundle.token_to_kv_pool, bundle.token_to_kv_pool_allocator
    raw = bundle.unified_memory_pool._raw
    scatter(allocator)
    probes = [
        tokens_by_table(name, buffer, allocator.full_attn_allocator, raw, rank=rank)
        for name, buffer in buffers(pool.full_kv_pool)
    ]
    probes += state_by_table(pool.mamba_pool, allocator.mamba_allocator, raw)
    requests = bundle.req_to_token_pool
    sources, targets = own_slots(requests)
    return Built(pool, allocator, probes, sources, targets, requests, poisoned(raw))


def windows(bundle: Any, gone: int = 0, window: int | None = None) -> Built:
    """Builds a case from a window_bundle; `gone` tokens have left the window when it is saved."""
    pool, allocator = bundle.token_to_kv_pool, bundle.token_to_kv_pool_allocator
    raw = bundle.unified_memory_pool._raw
    scatter(allocator)
    sides = (
        ("full", pool.full_kv_pool, allocator.full_attn_allocator, 0),
        ("swa", pool.swa_kv_pool, allocator.swa_attn_allocator, gone),
    )
    probes = [
        tokens_by_table(f"{side}.{name}", buffer, owner, raw, left)
        for side, held, owner, left in sides
        for name, buffer in buffers(held)
    ]

    def prepare(slots: torch.Tensor) -> None:
        if gone:
            allocator.free_swa_segment(slots[:gone], start_pos=0)
        randomise(raw)

    return Built(pool, allocator, probes, prepare=prepare, window_tokens=window)


def _tail() -> Built:
    """Builds a case in which a request comes back with fewer rows than it had: its window's."""
    built, calls = windows(window_bundle(), gone=32), list[int]()
    allocator = built.allocator

    def prepare(slots: torch.Tensor) -> None:
        allocator.free_swa_segment(slots[:PAGE], start_pos=0)
        randomise(allocator.unified_buffer._raw)

    def allocate(count: int) -> torch.Tensor:
        # SGLang allocates slots of a window alone by a kernel that CPUs lack.
        calls.append(count)
        slots: torch.Tensor = allocator.alloc(count)
        if len(calls) > 1:
            allocator.free_swa_segment(slots[: 2 * PAGE], start_pos=0)
        return slots

    built.prepare, built.allocate, built.window_tokens = prepare, allocate, 20
    return built


def _all() -> Built:
    bundle = all_bundle()
    built, requests = windows(bundle, gone=PAGE, window=37 - PAGE), bundle.req_to_token_pool
    raw = bundle.unified_memory_pool._raw
    state = state_by_table(requests.mamba_pool, built.allocator.mamba_allocator, raw)
    built.probes, built.request_pool = [*built.probes, *state], requests
    built.sources, built.targets = own_slots(requests)
    return built


def _shared_context(rank: int) -> Built:
    """Builds the pool of a rank that has the latents of every second slot; another has the rest."""
    with shared_context(rank, 2) as stack:
        built = hybrid(rank=rank, **LATENT)
        built.undo = stack.pop_all().close
        return built


LATENT = {"use_mla_backend": True, "kv_lora_rank": 48, "qk_rope_head_dim": 16}

CASES = [
    Case("unified MHA beside state", hybrid, "wrong", reason=ALIASED, only_on="CPU"),
    Case("unified MHA beside state, page 1", lambda: hybrid(1), "wrong", 13, 1, ALIASED, "CPU"),
    Case(
        "unified MLA beside state", lambda: hybrid(**LATENT), "wrong", reason=ALIASED, only_on="CPU"
    ),
    *(
        Case(
            f"unified MLA beside state, rank {rank} of 2 that share a context",
            partial(_shared_context, rank),
            "wrong",
            page_size=2 * PAGE,
            reason="slots of both ranks are looked up in the table as if they were this rank's",
        )
        for rank in (0, 1)
    ),
    Case("unified SWA", lambda: windows(window_bundle()), "exact"),
    Case("unified SWA, page 1", lambda: windows(window_bundle(1)), "exact", 13, 1),
    Case(
        "unified SWA, two pages out of the window",
        lambda: windows(window_bundle(), gone=32, window=29),
        "exact",
        61,
    ),
    Case("unified SWA, fewer rows at the target", _tail, "exact", 61),
    Case("unified SWA beside state", _all, "wrong", reason=VIRTUAL),
]

REFUSED = [
    Refusal(
        "unified memory without an allocator",
        lambda: Built(hybrid_bundle().token_to_kv_pool, None, []),
        "only its allocator knows where slots lie",
    ),
]
