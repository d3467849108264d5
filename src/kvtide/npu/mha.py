"""SGLang's NPU pool for multi-head and grouped-query attention, over a kvtide Pool."""

from __future__ import annotations

from typing import final

import torch

from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.layout import GQA
from kvtide.layout.dtypes import dtype_name
from kvtide.npu.base import NPUTokenToKVPool
from kvtide.npu.planes import PlaneBuffer, refuse, size_of


@final
class NPUMHATokenToKVPool(NPUTokenToKVPool):
    """Keys and values [layer, page, token, head, head_dim], in `k_buffer` and `v_buffer`.

    The keywords up to `allocation_label` are SGLang's and mean the same; `enable_alt_stream` and
    `enable_kv_cache_copy` have no effect. With `use_fia` each buffer is a list of views, one per
    layer, [slot, 1, head, head_dim]. `host_limit_bytes` bounds the host memory of CPU copies
    (default: four times the pool). Raises LayoutError for an unsupported value, TypeError for an
    unknown keyword.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device | Device,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_alt_stream: bool = True,
        enable_kv_cache_copy: bool = False,
        kv_cache_layout: str | None = None,
        quant_method: object = None,
        post_capture_active: bool = False,
        allocation_label: str | None = None,
        *,
        use_fia: bool = False,
        host_limit_bytes: int | None = None,
    ) -> None:
        del enable_alt_stream, enable_kv_cache_copy
        if kv_cache_layout not in (None, "nhd"):
            raise LayoutError(f"NPU pool: kv_cache_layout {kv_cache_layout!r}; it must be 'nhd'")
        refuse("quant_method", quant_method, None, "scales would need more planes")
        refuse("post_capture_active", post_capture_active, False, "memory is allocated at once")
        super().__init__(
            size=size,
            page_size=page_size,
            dtype=dtype,
            layer_num=layer_num,
            device=device,
            enable_memory_saver=enable_memory_saver,
            start_layer=start_layer,
            end_layer=end_layer,
            host_limit_bytes=host_limit_bytes,
        )
        self.allocation_label = allocation_label
        sizes = {
            "head_num": head_num, "head_dim": head_dim, "v_head_dim": v_head_dim,
            "swa_head_num": swa_head_num, "swa_head_dim": swa_head_dim,
            "swa_v_head_dim": swa_v_head_dim,
        }  # fmt: skip
        given = {name: size_of(name, size) for name, size in sizes.items() if size is not None}
        self.head_num = given.get("swa_head_num", given["head_num"])
        self.head_dim = given.get("swa_head_dim", given["head_dim"])
        self.v_head_dim = given.get("swa_v_head_dim", given.get("v_head_dim", given["head_dim"]))
        geometry = GQA.bind(
            dtype=dtype_name(dtype),
            token=self.page_size,
            first_layer=self.start_layer,
            layer=self.layer_num,
            head=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )
        layers = range(self.start_layer, self.start_layer + self.layer_num)
        keys = self._zeros(self.layer_num, self.head_num, self.head_dim)
        values = self._zeros(self.layer_num, self.head_num, self.v_head_dim)
        self._hold(geometry, [PlaneBuffer("k", keys, layers), PlaneBuffer("v", values, layers)])
        self.k_buffer, self.v_buffer = keys, values
        if use_fia:
            self.k_buffer = [layer.view(-1, 1, *layer.shape[2:]) for layer in keys]
            self.v_buffer = [layer.view(-1, 1, *layer.shape[2:]) for layer in values]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the keys, and of the values, on the device."""
        keys, values = self._planes
        return keys.tensor.nbytes, values.tensor.nbytes

    def _stored(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        k_scale: float | None,
        v_scale: float | None,
    ) -> list[torch.Tensor]:
        if cache_v is None:
            raise LayoutError("NPU pool: keys to write without values; give cache_v")
        return [self._cast(cache_k, k_scale), self._cast(cache_v, v_scale)]
