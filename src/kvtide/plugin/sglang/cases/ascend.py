"""The NPU's pools to make round trips with: on CPU tensors, or on a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, final

import torch
from sglang.srt.hardware_backend.npu import memory_pool_npu
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

from kvtide.plugin.sglang.cases.keys_values import environment, scattered
from kvtide.plugin.sglang.cases.latent import last_first
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, Refusal

PAGE_SIZE, LAYER_COUNT = 16, 3
TILE = 16
"""Elements of a token that lie together in Ascend's NZ order."""

Locate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gives the page of each slot and its place within the page, int64 [token] each."""


@final
class TorchOfNpu:
    """torch with a `torch.npu` whose `synchronize` does nothing, which is right for CPU tensors.

    Only the module of the NPU's pools is given it: with an attribute `npu`, torch itself would
    make SGLang look for an NPU.
    """

    npu = SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        """Gives torch's attribute of that name."""
        return getattr(torch, name)


@contextmanager
def npu_pools(device: str) -> Iterator[None]:
    """Inside this context the NPU's pools can be built, and can copy."""
    before = memory_pool._is_npu, memory_pool_npu.torch
    memory_pool._is_npu = True
    if device == "cpu":
        memory_pool_npu.torch = TorchOfNpu()
    try:
        yield
    finally:
        memory_pool._is_npu, memory_pool_npu.torch = before


def built(
    device: str,
    kind: str,
    probes_of: Callable[[Any], list[ByteProbe]],
    *,
    size: int = 256,
    in_order: bool = False,
    ranks: tuple[int, int] = (0, 1),
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Built:
    """Builds a pool of three layers and its allocator, for a rank: `ranks` is (rank, count)."""
    rank, world = ranks
    with ExitStack() as stack:
        stack.enter_context(npu_pools(device))
        stack.enter_context(get_parallel().override(attn_dcp_size=world, attn_dcp_rank=rank))
        options.setdefault("dtype", torch.bfloat16)
        with environment(**(variables or {})):
            pool = getattr(memory_pool_npu, kind)(
                size=size, page_size=PAGE_SIZE, device=device, **options
            )
        slots = size if options.get("is_draft_worker") else size * world
        allocator = PagedTokenToKVPoolAllocator(
            slots, PAGE_SIZE * world, options["dtype"], device, pool, False
        )
        if not in_order:
            last_first(scattered(allocator))
        made = Built(pool, allocator, probes_of(pool))
        made.undo = stack.pop_all().close
        return made


def by_page(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Locates slots in a pool that has all slots."""
    return slots // PAGE_SIZE, slots % PAGE_SIZE


def by_turns(rank: int, world: int) -> Locate:
    """Locates a rank's share of slots: the ranks that share a context take turns by pages."""

    def locate(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = slots // (PAGE_SIZE * world)
        held = slots // PAGE_SIZE - turn * world == rank
        return turn[held], (slots % PAGE_SIZE)[held]

    return locate


def plane(
    name: str, layers: torch.Tensor, locate: Locate = by_page, *, tiled: bool = False
) -> list[ByteProbe]:
    """Probes of the layers of [layer, page, token, …], or in NZ order of [layer, page, tile, …]."""
    raw = layers.view(torch.uint8) if layers.element_size() == 1 else layers

    def of_layer(number: int, layer: torch.Tensor) -> ByteProbe:
        tiles = layer.view(len(layer), -1, PAGE_SIZE, TILE) if tiled else layer

        def read(slots: torch.Tensor, _: Any) -> torch.Tensor:
            pages, places = locate(slots)
            return (tiles[pages, :, places] if tiled else tiles[pages, places]).clone()

        return ByteProbe(f"{name}{number}", read, [layers])

    return [of_layer(number, layer) for number, layer in enumerate(raw)]


def mha_probes(pool: Any) -> list[ByteProbe]:
    """Probes of keys and values, in the tensors of all layers: attention takes views of them."""
    return [*plane("k", pool.k_buffer_tensor), *plane("v", pool.v_buffer_tensor)]


def minimax_probes(pool: Any) -> list[ByteProbe]:
    """Probes of keys and values, and of the index keys and index values, if the pool has any."""
    probes = mha_probes(pool.main_pool)
    if pool.index_kv_pool is not None:
        probes += plane("index_k", pool.index_kv_pool.k_buffer_tensor)
        probes += plane("index_v", pool.index_kv_pool.v_buffer_tensor)
    if pool.index_k_pool is not None:
        probes += plane("index_key_only", pool.index_k_pool.k_buffer_tensor)
    return probes


def mla_probes(
    locate: Locate = by_page, *, tiled: bool = False
) -> Callable[[Any], list[ByteProbe]]:
    """Probes of latents, ropes, index keys and their scales."""

    def probes_of(pool: Any) -> list[ByteProbe]:
        probes = plane("latent", pool.k_buffer, locate, tiled=tiled)
        if pool.v_buffer.numel():
            probes += plane("rope", pool.v_buffer, locate, tiled=tiled)
        if pool.index_k_buffer is not None:
            probes += plane("index_k", pool.index_k_buffer)
        if pool.index_k_scale_buffer is not None:
            probes += plane("index_k_scale", pool.index_k_scale_buffer)
        return probes

    return probes_of


def _mha(device: str, widths: tuple[int, int] = (16, 16), fia: bool = False, **more: Any) -> Built:
    options = {"head_num": 2, "head_dim": widths[0], "v_head_dim": widths[1], **more}
    return built(
        device,
        "NPUMHATokenToKVPool",
        mha_probes,
        variables={"ASCEND_USE_FIA": str(int(fia))},
        layer_num=LAYER_COUNT,
        enable_memory_saver=False,
        **options,
    )


def _keys_only(device: str, fia: bool) -> Built:
    return built(
        device,
        "NPUMHATokenToKOnlyPool",
        lambda pool: plane("k", pool.k_buffer_tensor),
        variables={"ASCEND_USE_FIA": str(int(fia))},
        layer_num=LAYER_COUNT,
        enable_memory_saver=False,
        head_num=1,
        head_dim=16,
    )


def _minimax(device: str, keys_only: list[int], fia: bool = False) -> Built:
    """Four layers of a later stage, the first without an indexer."""
    return built(
        device,
        "NPUMiniMaxSparseKVPool",
        minimax_probes,
        variables={"ASCEND_USE_FIA": str(int(fia))},
        head_num=2,
        head_dim=16,
        idx_head_dim=8,
        dense_layer_ids=[0, 3],
        sparse_layer_ids=[1, 2, 4, 5, 6],
        disable_value_sparse_layer_ids=keys_only,
        start_layer=3,
        end_layer=7,
    )


def _mla(
    device: str,
    locate: Locate = by_page,
    *,
    tiled: bool = False,
    **more: Any,
) -> Built:
    options = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, **more}
    return built(
        device,
        "NPUMLATokenToKVPool",
        mla_probes(locate, tiled=tiled),
        variables={"SGLANG_USE_FIA_NZ": str(int(tiled))},
        layer_num=LAYER_COUNT,
        enable_memory_saver=False,
        **options,
    )


FP8: dict[str, Any] = {
    "dtype": torch.float8_e4m3fn,
    "kv_lora_rank": 128,
    "kv_cache_dim": 128 + 4 + 2 * 32,
    "index_head_dim": 128,
}
"""A packed row has 128 bytes of latents, a scale, and 32 rope elements of two bytes."""


def _shared(device: str, rank: int, world: int, **more: Any) -> Built:
    """Builds a rank's pool of latents, with index keys of the whole context."""
    index = {"index_head_dim": 32, "index_size": 256 * world}
    return _mla(device, by_turns(rank, world), ranks=(rank, world), **{**index, **more})


def _draft(device: str) -> Built:
    """Builds a draft model's pool, which has all slots of the two ranks' allocator."""
    return _mla(
        device, ranks=(1, 2), size=512, is_draft_worker=True, index_head_dim=32, index_size=512
    )


UNEQUAL = "views the values by the keys' width, so keys and values must be of one"
TOKENS = "takes a token's row where a page is ordered by tiles: right for whole pages alone"
NO_COPY = "the class has no copy"


def mha_cases(device: str) -> list[Case]:
    """Cases of pools of keys and values."""
    return [
        Case("NPU MHA", lambda: _mha(device), "exact"),
        Case("NPU MHA, FIA", lambda: _mha(device, fia=True), "exact"),
        Case("NPU MHA fp8", lambda: _mha(device, dtype=torch.float8_e4m3fn), "exact"),
        Case("NPU MHA of a later stage", lambda: _mha(device, start_layer=5, end_layer=7), "exact"),
        Case(
            "NPU MHA, keys wider than values",
            lambda: _mha(device, (192, 128)),
            "crash",
            reason=UNEQUAL,
        ),
        Case(
            "NPU MHA, keys wider than values, FIA",
            lambda: _mha(device, (192, 128), fia=True),
            "crash",
            reason=UNEQUAL,
        ),
        Case(
            "NPU MHA, keys wider than values, a number of pages that hides it",
            lambda: _mha(device, (192, 128), size=272, in_order=True),
            "wrong",
            reason=UNEQUAL,
        ),
        Case(
            "NPU MHA, values wider than keys",
            lambda: _mha(device, (16, 24)),
            "wrong",
            37,
            16,
            UNEQUAL,
        ),
        Case("NPU keys alone", lambda: _keys_only(device, False), "crash", reason=NO_COPY),
        Case("NPU keys alone, FIA", lambda: _keys_only(device, True), "crash", reason=NO_COPY),
        Case("NPU MiniMax", lambda: _minimax(device, []), "crash", reason=NO_COPY),
        Case(
            "NPU MiniMax, some indexers without values, FIA",
            lambda: _minimax(device, [5], fia=True),
            "crash",
            reason=NO_COPY,
        ),
        Case(
            "NPU MiniMax, no indexer with values",
            lambda: _minimax(device, [4, 5, 6]),
            "crash",
            reason=NO_COPY,
        ),
    ]


def mla_cases(device: str) -> list[Case]:
    """Cases of pools of latents."""
    later: dict[str, Any] = {
        "index_head_dim": 32,
        "indexer_layer_ids": (5, 7),
        "start_layer": 5,
        "end_layer": 7,
    }
    return [
        Case("NPU MLA", lambda: _mla(device), "exact"),
        Case("NPU MLA with index keys", lambda: _mla(device, index_head_dim=128), "exact"),
        Case(
            "NPU MLA of a later stage, index keys in two layers",
            lambda: _mla(device, **later),
            "exact",
        ),
        Case("NPU MLA fp8, packed, index keys with scales", lambda: _mla(device, **FP8), "exact"),
        Case("NPU MLA, NZ, whole pages", lambda: _mla(device, tiled=True), "exact", 32),
        Case(
            "NPU MLA, NZ, partial last page",
            lambda: _mla(device, tiled=True, index_head_dim=32),
            "wrong",
            reason=TOKENS,
        ),
        Case("NPU MLA, one of 2 ranks", lambda: _shared(device, 0, 2), "exact", 75, 32),
        Case("NPU MLA fp8, one of 4 ranks", lambda: _shared(device, 2, 4, **FP8), "exact", 172, 64),
        Case(
            "NPU MLA, NZ, one of 2 ranks",
            lambda: _shared(device, 0, 2, tiled=True),
            "wrong",
            75,
            32,
            TOKENS,
        ),
        Case("NPU MLA of a draft model beside 2 ranks", lambda: _draft(device), "exact", 75, 32),
    ]


def cases(device: str) -> list[Case]:
    """All cases, with their tensors on a `device`, `cpu` or `npu`."""
    return [
        case if case.alone == "exact" else replace(case, only_on="NPU")
        for case in (*mha_cases(device), *mla_cases(device))
    ]


CASES = cases("cpu")

REFUSED = [
    Refusal(
        "NPU MLA with its own offload",
        lambda: built(
            "cpu",
            "NPUMLATokenToKVPool",
            lambda pool: [],
            variables={"SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD": "1"},
            layer_num=LAYER_COUNT,
            enable_memory_saver=False,
            kv_lora_rank=64,
            qk_rope_head_dim=32,
            index_head_dim=32,
        ),
        "SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD",
    ),
    Refusal("NPU MHA, one of 2 ranks", lambda: _mha("cpu", ranks=(1, 2)), "no way to write"),
]
