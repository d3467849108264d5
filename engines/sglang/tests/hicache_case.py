"""Host pools of SGLang's HiCache, and kvtide's storages over them, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtide.plugin.sglang.hicache.backend import Storage, storage_class
from kvtide.plugin.sglang.hicache.served_model import ServedModel
from kvtide.plugin.sglang.hicache.updates import Updates

PAGE = 4
TOKENS = 32
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def keys_values(layout: str, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> Any:
    """Makes a host pool of keys and values, of three layers."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    pool = MHATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=dtype, head_num=heads, head_dim=8, layer_num=3,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout, pin_memory=False,
        device_capacity_tokens=TOKENS, start_layer=0, end_layer=3,
    )  # fmt: skip


def latents(layout: str) -> tuple[Any, Any]:
    """Makes the host pools of DeepSeek's latents and of their index keys."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    page = 64
    pool = DSATokenToKVPool(
        size=page * 8, page_size=page, kv_lora_rank=32, dtype=torch.bfloat16, qk_rope_head_dim=16,
        layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=48,
    )  # fmt: skip
    kv = MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, 2.0, 0, page, layout, pin_memory=False,
        device_capacity_tokens=page * 8, start_layer=0, end_layer=2, target_layer_num=2,
    )  # fmt: skip
    return kv, DSAIndexerPoolHost(make_dsa_indexer_pool_decl(pool), kv, pin_memory=False)


def states(layout: str, temporal: int = 6) -> Any:
    """Makes a host pool of recurrent state; without `temporal` of convolutions alone."""
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost, MambaStateBufferInfo

    info = MambaStateBufferInfo(
        conv=[torch.zeros(2, 8, 5, 3, dtype=torch.bfloat16)],
        temporal=torch.zeros(2, 8, temporal, dtype=torch.float32),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout=layout)


POOLS: dict[str, Callable[[str], Any]] = {
    "kv": keys_values,
    "latent": lambda layout: latents(layout)[0],
    "indexer": lambda layout: latents(layout)[1],
    "mamba": states,
    "convolution": lambda layout: states(layout, temporal=0),
}
"""Makers of host pools. All but recurrent state have all three layouts."""

CASES = [
    (name, layout)
    for name in POOLS
    for layout in LAYOUTS
    if layout != "layer_first" or name not in ("mamba", "convolution")
]


def config(folder: Path, *, tp: tuple[int, int] = (0, 1), mla: bool = False, **extra: Any) -> Any:
    """Makes SGLang's configuration of a storage."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    given = {"disk_dir": str(folder), "disk_memory": "8MiB", "interface_v1": 1, **extra}
    return HiCacheStorageConfig(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=mla, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="model",
        extra_config={name: value for name, value in given.items() if value is not None},
    )  # fmt: skip


def storage(
    monkeypatch: Any,
    config: Any,
    pools: dict[str, Any],
    *,
    weights: str = "weights",
    updates: Updates | None = None,
    engine: str = "sglang 1",
) -> Storage:
    """Makes a storage over host pools, as SGLang does it in a server with these weights."""
    server = ServedModel(engine, "start", weights, config.tp_size, updates or Updates())
    monkeypatch.setattr(ServedModel, "running", lambda weights: server)
    monkeypatch.setattr("kvtide.plugin.sglang.hicache.backend.require_hooks", lambda: None)
    made = storage_class()(config, {})
    made.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


def names(count: int, chain: int = 0) -> list[str]:
    """Makes SGLang's names of pages."""
    return [f"{chain:032x}{number:032x}" for number in range(count)]


def rows_of(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Returns the rows of these pages of a host pool."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def buffers(pool: Any) -> list[torch.Tensor]:
    """Returns all the memory of a host pool, as bytes."""
    found = [
        *(getattr(pool, "conv_buffer", None) or ()),
        *(getattr(pool, name, None) for name in ("kv_buffer", "index_k_with_scale_buffer")),
        getattr(pool, "temporal_buffer", None),
    ]
    flat = [part for item in found if item is not None for part in _tensors(item)]
    distinct = {part.data_ptr(): part for part in flat if part.numel()}
    return [part.view(torch.uint8).flatten() for part in distinct.values()]


def _tensors(item: Any) -> list[torch.Tensor]:
    return [item] if isinstance(item, torch.Tensor) else list(item)


def page_bytes(pool: Any, page: int) -> torch.Tensor:
    """Returns a copy of a page's bytes, made by SGLang."""
    row = page * pool.page_size
    flat: torch.Tensor = pool.get_data_page(row, flat=True)
    return flat.contiguous().view(torch.uint8).clone()


def fill(pool: Any, seed: int = 0) -> None:
    """Fills the memory of a host pool with random bytes, the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        buffer.copy_(torch.randint(0, 256, (buffer.numel(),), dtype=torch.uint8, generator=random))
