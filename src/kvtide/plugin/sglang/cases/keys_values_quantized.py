"""Pools of quantized keys and values, with their scales, to make round trips with."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.mem_cache import memory_pool, minimax_m3_nvfp4_pool

from kvtide.plugin.sglang.cases.keys_values import (
    ON_CPU,
    allocator_for,
    by_head,
    key_value_probes,
    layer_probes,
    mha,
    scattered,
)
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case

M3_PAGE = 128
MXFP8 = {"kind": memory_pool.MHATokenToKVPoolMXFP8, "dtype": torch.float8_e4m3fn}


def interleaved_values(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Reads NVFP4's native scales of values, [page, head, token, block].

    Four tokens and four quarters of the blocks change places, by SGLang's
    `nvfp4_v_scale_swizzle_indices`.
    """
    _, _, page_size, blocks = buffer.shape
    page, token, block = (
        slots[:, None] // page_size,
        slots[:, None] % page_size,
        torch.arange(blocks),
    )
    quarter = blocks // 4
    return buffer[page, :, token // 4 * 4 + block // quarter, block % quarter * 4 + token % 4]


def interleaved_tokens(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Reads MXFP8's scales, [page, head, token % 32, token // 32, block]."""
    page_size = buffer.shape[2] * buffer.shape[3]
    token = slots % page_size
    return buffer[slots // page_size, :, token % 32, token // 32]


def scale_probes(pool: Any) -> list[ByteProbe]:
    """Probes of the scales that a pool has, a row for each token."""
    probes: list[ByteProbe] = []
    for name in ("k_scale_buffer", "v_scale_buffer"):
        probes += layer_probes(name, getattr(pool, name) or [])
    return probes


def _with_scales(**options: Any) -> Built:
    pool, allocator = mha(**options)
    return Built(pool, allocator, [*key_value_probes(pool), *scale_probes(pool)])


def _by_method(name: str, **options: Any) -> Built:
    method = get_kv_cache_quant_method(name, **options)
    built = _with_scales(widths=(64, 64), quant_method=method)
    if built.pool.native_k_scale_buffer is not None:
        built.probes = [
            *built.probes,
            *layer_probes("native_k_scale", built.pool.native_k_scale_buffer, by_head(16)),
            *layer_probes("native_v_scale", built.pool.native_v_scale_buffer, interleaved_values),
        ]
    return built


def _nvfp4(*, native: bool) -> Built:
    return _by_method("nvfp4", num_layers=3, device="cpu", page_size=16, native_scale_layout=native)


def _mxfp8_pages() -> Built:
    pool, allocator = mha(128, size=1024, widths=(128, 128), **MXFP8)
    probes = [
        *key_value_probes(pool),
        *layer_probes("k_scale", pool.k_scale_buffer, interleaved_tokens),
        *layer_probes("v_scale", pool.v_scale_buffer, interleaved_tokens),
    ]
    return Built(pool, allocator, probes)


def _m3_main() -> Built:
    pool = _m3(minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4MainKVPool, head_num=2)
    return Built(pool, _m3_allocator(pool), _m3_main_probes(pool))


def _m3_index() -> Built:
    pool = _m3(minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4IndexKPool, head_num=1)
    return Built(pool, _m3_allocator(pool), _m3_index_probes(pool))


def _m3_whole() -> Built:
    pool = minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4KVPool(
        size=1024,
        page_size=M3_PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=[0, 1, 2, 3],
        disable_value_sparse_layer_ids=[0, 1, 2, 3],
        start_layer=2,
        end_layer=4,
        **ON_CPU,
    )
    probes = [*_m3_main_probes(pool.main_pool), *_m3_index_probes(pool.index_k_pool)]
    return Built(pool, _m3_allocator(pool), probes)


def _m3(kind: Any, head_num: int) -> Any:
    return kind(
        size=1024,
        page_size=M3_PAGE,
        dtype=torch.bfloat16,
        head_num=head_num,
        head_dim=128,
        layer_num=2,
        start_layer=3,
        end_layer=5,
        **ON_CPU,
    )


def _m3_allocator(pool: Any) -> Any:
    return scattered(allocator_for(pool, 1024, M3_PAGE, torch.bfloat16))


def _m3_main_probes(pool: Any) -> list[ByteProbe]:
    names = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
    read = by_head(M3_PAGE)
    return [p for name in names for p in layer_probes(name, getattr(pool, name), read, pool.rows)]


def _m3_index_probes(pool: Any) -> list[ByteProbe]:
    """Their buffers are [page, token, byte]."""

    def read(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return buffer[slots // M3_PAGE, slots % M3_PAGE]

    return [
        probe
        for name in ("k_buffer", "k_scale_buffer")
        for probe in layer_probes(f"index_{name}", getattr(pool, name), read, pool.rows)
    ]


_NO_SCALES = "its copy leaves the scales behind, so that payloads meet those of another request"

CASES = [
    Case("MHA, cpu_fp8_e4m3", lambda: _by_method("cpu_fp8_e4m3"), "exact"),
    Case("MHA, fp4_mx_block16", lambda: _by_method("fp4_mx_block16"), "wrong", reason=_NO_SCALES),
    Case("MHA, nvfp4", lambda: _nvfp4(native=False), "wrong", reason=_NO_SCALES),
    Case("MHA, nvfp4 with native scales", lambda: _nvfp4(native=True), "wrong", reason=_NO_SCALES),
    Case(
        "MHA FP4",
        lambda: _with_scales(kind=memory_pool.MHATokenToKVPoolFP4, widths=(32, 32)),
        "wrong",
        reason=_NO_SCALES,
    ),
    Case(
        "MHA MXFP8, page 16",
        lambda: _with_scales(widths=(64, 32), **MXFP8),
        "crash",
        reason="torch can't write to some indices of a float8_e8m0fnu tensor there",
        only_on="CPU",
    ),
    Case(
        "MHA MXFP8, page 128, interleaved scales",
        _mxfp8_pages,
        "crash",
        300,
        M3_PAGE,
        "its copy writes scales with a kernel that needs an accelerator",
        "CPU",
    ),
    Case("MiniMax M3 NVFP4, main", _m3_main, "exact", 300, M3_PAGE),
    Case(
        "MiniMax M3 NVFP4, index",
        _m3_index,
        "crash",
        300,
        M3_PAGE,
        "its copy doesn't take the arguments that the others take",
    ),
    Case("MiniMax M3 NVFP4, whole", _m3_whole, "exact", 300, M3_PAGE),
]
