"""A plugin of SGLang that lets its HiCache run without an accelerator, in plain torch.

torch pins memory only where there is an accelerator, and SGLang imports the kernels that copy
between host and device only there. Nothing here touches the way between host and storage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.mem_cache.pool_host import base, dsa, mamba, mha, mla

    for pool in (base.HostKVCache, mamba.MambaPoolHost, dsa.DSAIndexerPoolHost):
        pool.__init__ = _unpinned(pool.__init__)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # of 10 GiB, for a machine that has less
    for module in (mha, mla, mamba, dsa):
        module.transfer_kv_direct = _direct
        module.transfer_kv_all_layer_direct_lf_pf = _down_by_page
        module.transfer_kv_per_layer_direct_pf_lf = _up_by_page
    mha.transfer_kv_all_layer_lf_pf = _down_keys_values
    mha.transfer_kv_per_layer_pf_lf = _up_keys_values
    for module in (mla, dsa):
        module.transfer_kv_all_layer_mla_lf_pf = _down
        module.transfer_kv_per_layer_mla_pf_lf = _up
    mamba.transfer_kv_mamba_lf_pf = lambda src_ptrs, **more: _down(src_ptrs, **more)
    mamba.transfer_kv_mamba_pf_lf = _up


def _unpinned(original: Callable[..., None]) -> Callable[..., None]:
    def build(pool: Any, *args: Any, **kwargs: Any) -> None:
        original(pool, *args, **{**kwargs, "pin_memory": False})

    return build


def _direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _down_by_page(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        host, layer = dst_ptrs[number // layers], number % layers
        host[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def _up_by_page(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for host, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = host[src_indices // page_size, layer_id, src_indices % page_size]


def _down(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """`src_layers` has addresses, which on a CPU are the host's."""
    pairs = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
    for layer, address in enumerate(src_layers.tolist()):
        for source, target in pairs:
            place = dst.data_ptr() + target * dst_layout_dim + layer * item_size
            ctypes.memmove(place, address + source * item_size, item_size)


def _down_keys_values(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    **more: Any,
) -> None:
    _down(src_k_layers, dst_k, **more)
    _down(src_v_layers, dst_v, **more)


def _up(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    rows = src[src_indices, layer_id].view(dst.dtype)
    dst[dst_indices] = rows.reshape(len(src_indices), *dst.shape[1:])


def _up_keys_values(
    src_k: torch.Tensor, dst_k: torch.Tensor, src_v: torch.Tensor, dst_v: torch.Tensor, **more: Any
) -> None:
    _up(src_k, dst_k, **more)
    _up(src_v, dst_v, **more)
