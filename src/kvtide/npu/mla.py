"""SGLang's NPU pool for multi-head latent attention, over a kvtide Pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from kvtide.device import Device
from kvtide.errors import LayoutError, SlotError
from kvtide.integers import integers_of, shown
from kvtide.layout import Geometry
from kvtide.layout.dtypes import dtype_name
from kvtide.layout.mla import MLA_NZ, MLA_PACKED, MLA_SPLIT
from kvtide.npu.base import NPUTokenToKVPool
from kvtide.npu.copy import TILE_COLUMNS
from kvtide.npu.planes import PlaneBuffer, refuse, size_of

_SCALE_COLUMNS = 128
_LARGEST_FP8 = 448.0  # of e4m3fn


@final
class NPUMLATokenToKVPool(NPUTokenToKVPool):
    """Latents [layer, page, token, 1, kv_lora_rank] in `k_buffer`, rotary keys in `v_buffer`.

    The keywords up to `is_draft_worker` are SGLang's and mean the same. With `index_head_dim` the
    layers `indexer_layer_ids` (the model's numbers; default: all layers of the stage) have index
    keys in `index_k_buffer`, [index layer, page, token, 1, index_head_dim]. With float8_e4m3fn,
    index keys and `kv_cache_dim` a token is a packed record of that many bytes: the latent, rope
    in bfloat16, and a float32 scale for each 128 elements of the latent. Then `v_buffer` is empty,
    and `index_k_scale_buffer` has the scales of the index keys.

    With `use_fia` each buffer is a list of views, one per layer. With `use_fia_nz` a page's bytes
    are in Ascend's NZ order, [tile, token, 16], but the buffers keep their shapes, as in SGLang.
    `host_limit_bytes` bounds the host memory of CPU copies (default: four times the pool). Raises
    LayoutError for an unsupported value, TypeError for an unknown keyword.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device | Device,
        enable_memory_saver: bool,
        index_head_dim: int | None = None,
        index_size: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_page_size: int | None = None,
        indexer_layer_ids: Sequence[int] | None = None,
        kv_cache_dim: int | None = None,
        is_draft_worker: bool = False,
        *,
        use_fia: bool = False,
        use_fia_nz: bool = False,
        host_limit_bytes: int | None = None,
    ) -> None:
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
        for name, value, only in (
            ("index_size", index_size, size),
            ("index_page_size", index_page_size, page_size),
        ):
            if value not in (None, only):
                raise LayoutError(
                    f"NPU pool: {name} {value} isn't the pool's {only}: index keys of other ranks' "
                    "tokens need a context-parallel pool"
                )
        self.is_draft_worker = is_draft_worker
        self.kv_lora_rank = size_of("kv_lora_rank", kv_lora_rank)
        self.qk_rope_head_dim = size_of("qk_rope_head_dim", qk_rope_head_dim)
        if index_head_dim is not None:
            index_head_dim = size_of("index_head_dim", index_head_dim)
        self.index_head_dim = index_head_dim
        self.indexer_layer_ids = self._index_layers(indexer_layer_ids)
        self.dsa_kv_cache_store_fp8 = self._is_packed(kv_cache_dim)
        self.use_fia_nz = use_fia_nz
        if use_fia_nz:
            self._check_tiles()
        self.kv_cache_dim = kv_lora_rank
        if self.dsa_kv_cache_store_fp8:
            self.store_dtype = dtype
            self.kv_cache_dim = self._record_bytes
        geometry = self._geometry()
        planes = self._buffers()
        self._hold(geometry, planes)
        if use_fia:
            self.k_buffer, self.v_buffer = list(self.k_buffer), list(self.v_buffer)

    @property
    def _record_bytes(self) -> int:
        scales = self.kv_lora_rank // _SCALE_COLUMNS
        return self.kv_lora_rank + 4 * scales + 2 * self.qk_rope_head_dim

    def _index_layers(self, given: Sequence[int] | None) -> tuple[int, ...]:
        stage = range(self.start_layer, self.start_layer + self.layer_num)
        if self.index_head_dim is None:
            return ()
        try:
            ids = stage if given is None else integers_of(given, "layer", "layer").tolist()
        except SlotError as error:
            raise LayoutError(f"NPU pool: indexer_layer_ids {shown(given)}: {error}") from error
        layers = tuple(ids)
        if len(set(layers)) < len(layers) or not set(layers) <= set(stage):
            raise LayoutError(
                f"NPU pool: indexer_layer_ids {list(layers)} must be distinct layers of "
                f"{stage.start} … {stage.stop - 1}"
            )
        return layers

    def _is_packed(self, kv_cache_dim: int | None) -> bool:
        """Whether tokens are packed records. Raises LayoutError for an impossible width."""
        whole = self.kv_lora_rank + self.qk_rope_head_dim
        if kv_cache_dim is not None:
            kv_cache_dim = size_of("kv_cache_dim", kv_cache_dim)
        if kv_cache_dim in (None, self.kv_lora_rank, whole):
            return False
        is_fp8 = self.dtype == torch.float8_e4m3fn and self.index_head_dim is not None
        if not is_fp8 or self.kv_lora_rank % _SCALE_COLUMNS or kv_cache_dim != self._record_bytes:
            raise LayoutError(
                f"NPU pool: kv_cache_dim {kv_cache_dim} isn't {whole}; a packed record needs "
                f"float8_e4m3fn, index keys and latents in multiples of {_SCALE_COLUMNS}, and has "
                f"{self._record_bytes} bytes"
            )
        return True

    def _check_tiles(self) -> None:
        refuse("use_fia_nz", self.dsa_kv_cache_store_fp8, False, "packed records have no tiles")
        if self.kv_lora_rank % TILE_COLUMNS or self.qk_rope_head_dim % TILE_COLUMNS:
            raise LayoutError(
                f"NPU pool: NZ tiles have {TILE_COLUMNS} columns, kv_lora_rank "
                f"{self.kv_lora_rank} and qk_rope_head_dim {self.qk_rope_head_dim} must be "
                "multiples of that"
            )

    def _geometry(self) -> Geometry:
        sizes: dict[str, Any] = {"layer": self.layer_num}
        if self.index_head_dim is not None and self.indexer_layer_ids:
            sizes["index_layer"] = self.indexer_layer_ids
            sizes["index_head_dim"] = self.index_head_dim
        if self.dsa_kv_cache_store_fp8:
            layout = MLA_PACKED
            sizes["record_bytes"] = self._record_bytes
            if self.indexer_layer_ids:
                sizes["index_scale_dim"] = 1
        elif self.use_fia_nz:
            layout = MLA_NZ
            sizes["latent_tile"] = self.kv_lora_rank // TILE_COLUMNS
            sizes["rope_tile"] = self.qk_rope_head_dim // TILE_COLUMNS
        else:
            layout = MLA_SPLIT
            sizes["kv_lora_rank"] = self.kv_lora_rank
            sizes["qk_rope_head_dim"] = self.qk_rope_head_dim
        return layout.bind(
            dtype=dtype_name(self.dtype),
            token=self.page_size,
            first_layer=self.start_layer,
            **sizes,
        )

    def _buffers(self) -> list[PlaneBuffer]:
        """Allocates the planes, in the order of a copy's tensors."""
        stage = range(self.start_layer, self.start_layer + self.layer_num)
        tiles = [0, 0]
        if self.use_fia_nz:
            widths = (self.kv_lora_rank, self.qk_rope_head_dim)
            tiles = [width // TILE_COLUMNS for width in widths]
        latents = self._zeros(self.layer_num, 1, self.kv_cache_dim)
        if self.dsa_kv_cache_store_fp8:
            ropes = self._zeros(self.layer_num, 1, 0, dtype=torch.bfloat16)
        else:
            ropes = self._zeros(self.layer_num, 1, self.qk_rope_head_dim)
        self.k_buffer, self.v_buffer = latents, ropes
        planes = [
            PlaneBuffer("latent", latents, stage, tiles[0]),
            PlaneBuffer("rope", ropes, stage, tiles[1]),
        ]
        self.index_k_buffer = self.index_k_scale_buffer = None
        if self.index_head_dim is not None:
            layers = self.indexer_layer_ids
            self.index_k_buffer = self._zeros(len(layers), 1, self.index_head_dim)
            planes.append(PlaneBuffer("index_k", self.index_k_buffer, layers))
            if self.dsa_kv_cache_store_fp8:
                self.index_k_scale_buffer = self._zeros(len(layers), 1, dtype=torch.float32)
                planes.append(PlaneBuffer("index_scale", self.index_k_scale_buffer, layers))
        return planes

    def _stored(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        k_scale: float | None,
        v_scale: float | None,
    ) -> list[torch.Tensor]:
        refuse("k_scale", k_scale, None, "a latent has no scale")
        refuse("v_scale", v_scale, None, "a rotary key has no scale")
        if cache_v is None:
            widths = (self.kv_lora_rank, self.qk_rope_head_dim)
            is_record = cache_k.shape[-1] == self.kv_cache_dim and cache_k.element_size() == 1
            if self.dsa_kv_cache_store_fp8 and is_record:
                return [cache_k]
            if cache_k.shape[-1] != sum(widths):
                raise LayoutError(
                    f"NPU pool: rows {list(cache_k.shape)} aren't latent and rope of {widths}"
                )
            cache_k, cache_v = cache_k[..., : widths[0]], cache_k[..., widths[0] :]
        if self.dsa_kv_cache_store_fp8:
            return [self._packed(cache_k, cache_v)]
        return [self._cast(cache_k), self._cast(cache_v)]

    def _packed(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Packs records, uint8 [token, record_bytes]: latent in fp8, rope in bfloat16, scales."""
        tiles = latent.reshape(-1, self.kv_lora_rank // _SCALE_COLUMNS, _SCALE_COLUMNS).float()
        tiny = torch.finfo(torch.float32).tiny
        scales = tiles.abs().amax(-1).clamp(min=tiny) / _LARGEST_FP8
        values = (tiles / scales[..., None]).to(self.dtype)
        ropes = rope.to(torch.bfloat16).reshape(-1, self.qk_rope_head_dim)
        parts = (values.flatten(1), ropes, scales)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
