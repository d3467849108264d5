"""The base of SGLang's NPU pools: SGLang's names and signatures, over a kvtide Pool.

Source of the names, signatures and shapes: SGLang 0.5.23, hardware_backend/npu/memory_pool_npu.py
and mem_cache/memory_pool.py.

SGLang waits for the whole device before and after a copy, since any stream may have written the
slots. These pools wait for the whole device before a copy, and for the copy's ticket after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice, Device, open_device
from kvtide.errors import LayoutError, SlotError
from kvtide.integers import integer_of, shown
from kvtide.layout import Geometry
from kvtide.npu.copy import CopyPart, CPUCopy, planes_of_lists
from kvtide.npu.planes import (
    KEPT_AS_BYTES,
    BufferInfos,
    Layer,
    PlaneBuffer,
    infos_of,
    refuse,
    size_of,
    slots_on,
    tell_unused,
)
from kvtide.pool.pool import Pool
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide

_DEFAULT_CHUNK_SIZE = 8192
_LEAST_HOST_BYTES = 64 << 20


class NPUTokenToKVPool:
    """The base of SGLang's NPU pools: one pipeline stage's KV, in pages, on one device.

    In every call layer ids are the model's; the buffers count layers from `start_layer`. Page 0 is
    padding, so there are `size // page_size + 1` pages. `device` is a device's name or a kvtide
    Device. Not thread-safe: one thread schedules.
    """

    k_buffer: torch.Tensor | list[torch.Tensor]
    v_buffer: torch.Tensor | list[torch.Tensor]

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str | torch.device | Device,
        enable_memory_saver: bool,
        start_layer: int | None,
        end_layer: int | None,
        host_limit_bytes: int | None,
    ) -> None:
        """Called by the pools, which call `_hold` once they have allocated their buffers."""
        refuse("enable_memory_saver", enable_memory_saver, False, "it moves tensors in memory")
        self.size, self.page_size = size_of("size", size), size_of("page_size", page_size)
        if self.size < self.page_size:
            raise LayoutError(f"NPU pool: size {size} doesn't hold a page of {page_size} tokens")
        self._set_stage(layer_num, start_layer, end_layer)
        if host_limit_bytes is not None:
            host_limit_bytes = size_of("host_limit_bytes", host_limit_bytes, 0)
        self._owns_device = isinstance(device, str | torch.device)
        self._device = _opened(device)
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in KEPT_AS_BYTES else dtype
        self.device = self._device.name
        self._chunk_size = _DEFAULT_CHUNK_SIZE
        self._host_limit_bytes = host_limit_bytes
        self._said: set[str] = set()

    def _set_stage(self, layer_num: int, start_layer: int | None, end_layer: int | None) -> None:
        self.layer_num = size_of("layer_num", layer_num)
        self.start_layer = 0 if start_layer is None else size_of("start_layer", start_layer, 0)
        last = self.start_layer + self.layer_num - 1
        self.end_layer = last if end_layer is None else size_of("end_layer", end_layer, 0)
        if self.end_layer < last:
            raise LayoutError(
                f"NPU pool: {layer_num} layers don't fit between start_layer {self.start_layer} "
                f"and end_layer {self.end_layer}"
            )

    def _zeros(self, layer_count: int, *row: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A zeroed tensor [layer, page, token, *row] on the device."""
        shape = (layer_count, self.size // self.page_size + 1, self.page_size, *row)
        return torch.zeros(shape, dtype=dtype or self.store_dtype, device=self._device.torch_device)

    def _hold(self, geometry: Geometry, planes: Sequence[PlaneBuffer]) -> None:
        """Takes the stage's planes, in the order of a copy's tensors. The geometry has only planes
        with a width."""
        self._planes = list(planes)
        held = [plane for plane in planes if not plane.is_empty]
        declared = {plane.name: plane for plane in geometry.planes}
        adopted = {plane.name: plane.rows(declared[plane.name].dtype) for plane in held}
        # Page 0 is padding: a table of slots has 0 for a token without a slot.
        self._pool = Pool.adopt(geometry, self._device, adopted, padding_slots=self.page_size)
        limit = self._host_limit_bytes
        if limit is None:
            # Four times the pool, since the pages of retracted requests are used again.
            limit = max(_LEAST_HOST_BYTES, 4 * self._pool.size_bytes)
        block_bytes = self._device.chunk_bytes
        self._arena = HostArena(self._device, limit_bytes=limit, block_bytes=block_bytes)
        self._tide = Tide(self._pool, self._arena)
        self._parts = self._parts_of(geometry, held)

    def _parts_of(self, geometry: Geometry, held: Sequence[PlaneBuffer]) -> list[list[CopyPart]]:
        """For each layer, its tensors in a CPU copy."""
        names = [plane.name for plane in geometry.planes]
        assert names == [plane.name for plane in held], "buffers are numbered in this order"
        groups = geometry.groups
        parts: list[list[CopyPart]] = [[] for _ in range(self.layer_num)]
        paged = {plane.name for plane in geometry.planes if plane.unit == "page"}
        buffer = 0
        for plane in self._planes:
            for layer in plane.layers:
                number, group = None, 0
                if not plane.is_empty:
                    number, group = buffer, groups[self._pool.buffer_rows[buffer].plane]
                    buffer += 1
                part = CopyPart(
                    plane.name,
                    number,
                    group,
                    plane.row_shape,
                    torch.uint8 if plane.tensor.dtype in KEPT_AS_BYTES else plane.tensor.dtype,
                    plane.tiles if plane.name in paged else 0,
                    self.page_size,
                )
                parts[layer - self.start_layer].append(part)
        return parts

    # ---- buffers ---------------------------------------------------------------------

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """A layer's keys (MLA: latents) as a view in the model's dtype.

        The shape is [page, token, head, head_dim], or for FIA [slot, 1, head, head_dim].
        """
        return self._typed(self.k_buffer[self._local(layer_id)])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """A layer's values (MLA: rotary keys; packed records: [page, token, 1, 0])."""
        return self._typed(self.v_buffer[self._local(layer_id)])

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values: see `get_key_buffer` and `get_value_buffer`."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """A layer's index keys, a view [page, token, 1, index_head_dim], or LayoutError."""
        plane, number = self._place("index_k", layer_id)
        return self._typed(plane.tensor[number])

    def get_index_k_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """The scales of a layer's index keys, a view, float32 [page, token, 1], or LayoutError."""
        plane, number = self._place("index_scale", layer_id)
        return plane.tensor[number]

    def set_kv_buffer(
        self,
        layer: Layer,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Writes tokens to the slots `loc_info`, integers [token], or an object with them as `loc`.

        `cache_k` and `cache_v` are [token, …]. They aren't changed; the pool stores them in its
        dtype, divided by the scales if those are given. Slots are not checked, since that would
        wait for the device. Raises LayoutError for a layer of another stage and for rows of
        another width.
        """
        refuse("dcp_kv_mask", dcp_kv_mask, None, "the pool isn't shared by ranks")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        number = self._local(layer_id)
        loc = self._on_device(getattr(loc_info, "loc", loc_info))
        stored = self._stored(cache_k, cache_v, k_scale, v_scale)
        for plane, values in zip(self._planes, stored, strict=False):
            self._check_rows(plane, loc, values)
        for plane, values in zip(self._planes, stored, strict=False):
            plane.write(number, loc, values)

    def set_index_k_buffer(self, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Writes index keys, [token, …], to slots; raises as `set_kv_buffer` does."""
        plane, number = self._place("index_k", layer_id)
        self._write(plane, number, loc, self._cast(index_k))

    def set_index_k_scale_buffer(
        self, layer_id: int, loc: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Writes the scales of index keys, [token, …], to slots; raises as `set_kv_buffer` does."""
        plane, number = self._place("index_scale", layer_id)
        self._write(plane, number, loc, scale.to(torch.float32))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies all rows of the tokens in `src_loc` to `tgt_loc`, both integers [token].

        The slots may overlap: all tokens are read before one is written. Slots are not checked.
        Raises SlotError if their numbers differ.
        """
        target, source = self._on_device(tgt_loc), self._on_device(src_loc)
        if target.numel() != source.numel():
            raise SlotError(f"{source.numel()} slots to move to {target.numel()} slots")
        for plane in self._planes:
            for number in range(0 if plane.is_empty else len(plane.layers)):
                plane.move(number, target, source)

    # ---- what transfer engines register ------------------------------------------------

    def get_contiguous_buf_infos(self) -> BufferInfos:
        """Addresses, lengths and page lengths in bytes of all buffers, one per plane and layer."""
        return infos_of([plane for plane in self._planes if not plane.is_empty])

    def get_state_buf_infos(self) -> BufferInfos:
        """Addresses, lengths and page lengths in bytes of index keys and their scales."""
        names = ("index_k", "index_scale")
        return infos_of([plane for plane in self._planes if plane.name in names])

    def get_kv_size_bytes(self) -> int | tuple[int, int]:
        """Bytes on the device: of keys and of values; for MLA a single number."""
        return sum(plane.tensor.nbytes for plane in self._planes)

    # ---- host copies -------------------------------------------------------------------

    @property
    def cpu_offloading_chunk_size(self) -> int:
        """How many tokens a chunk of a CPU copy has. Existing copies keep their chunk size."""
        return self._chunk_size

    @cpu_offloading_chunk_size.setter
    def cpu_offloading_chunk_size(self, token_count: int) -> None:
        self._chunk_size = size_of("cpu_offloading_chunk_size", token_count)

    @property
    def host_used_bytes(self) -> int:
        """Bytes of host memory that CPU copies use."""
        return self._arena.used_bytes

    def get_cpu_copy(
        self, indices: Any, mamba_indices: Any = None, req_pool_index: int | None = None
    ) -> CPUCopy:
        """Copies the rows of the tokens in `indices` (integers [token]) to host memory.

        The result is `copy[layer][chunk] -> [k, v]`, or `[latent, rope]` with `index_k` and
        `index_scale` if the layer has them. It uses host memory until it is released or forgotten.
        Blocks until the bytes are copied; then the slots may be reused. Raises SlotError for
        invalid slots and, in NZ order, for a page whose first slot is missing. Raises ArenaFull,
        and takes nothing, if the host limit leaves no room. The last two arguments are ignored,
        and the log says so once: these pools have no recurrent state and no rows of requests.
        """
        tell_unused(self._said, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        self._synchronize()
        snapshot = self._tide.offload(indices)
        try:
            return CPUCopy(snapshot, self._pool.geometry, self._parts, self._chunk_size)
        except BaseException:
            self._tide.discard(snapshot)
            raise

    def load_cpu_copy(
        self,
        kv_cache_cpu: Any,
        indices: Any,
        mamba_indices: Any = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Writes a copy to the slots `indices`, integers [token], as many as the copy's tokens.

        The copy stays valid. Nested lists of host tensors, as engines make them, are accepted too;
        they don't say which stage they are from, and are copied once more. Blocks until the bytes
        are written. In NZ order whole pages are written: the slots behind the last token in its
        page are overwritten too. A copy that came as lists writes zeros there.

        Before a byte is written this raises SnapshotMiss for a copy of another geometry, stage or
        length, or a released copy; LayoutError for lists of another form; SlotError; ArenaFull (for
        lists only); SnapshotDamaged for changed bytes. It raises SlotsLost if the device fails
        while it writes: then nothing may read these slots, and the copy is still whole.
        """
        tell_unused(self._said, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        self._synchronize()
        slots = self._pool.checked(indices)
        if isinstance(kv_cache_cpu, CPUCopy):
            self._tide.restore(kv_cache_cpu.snapshot, slots)
            return
        snapshot = self._snapshot_of(kv_cache_cpu, slots.size)
        try:
            self._tide.restore(snapshot, slots)
        finally:
            self._tide.discard(snapshot)

    def close(self) -> None:
        """Closes the device if the pool opened it. CPU copies stay valid."""
        self._tide.close()
        if self._owns_device:
            self._device.close()

    # ---- within ------------------------------------------------------------------------

    def _stored(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        k_scale: float | None,
        v_scale: float | None,
    ) -> list[torch.Tensor]:
        """The tokens as the first planes store them: [token, …] in their dtypes."""
        raise NotImplementedError

    def _snapshot_of(self, lists: Any, token_count: int) -> Snapshot:
        """A snapshot made from an engine's lists, with a pool on the host as an intermediate."""
        geometry = self._pool.geometry
        planes = planes_of_lists(self._parts, lists, token_count, self.page_size)
        dtypes = {plane.name: getattr(torch, plane.dtype) for plane in geometry.planes}
        typed = {
            name: [tensor.view(dtypes[name]) for tensor in tensors]
            for name, tensors in planes.items()
        }
        device = CPUDevice(lanes=1)
        try:
            host = Tide(Pool.adopt(geometry, device, typed), self._arena)
            return host.offload(np.arange(token_count))
        finally:
            device.close()

    def _cast(self, values: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Values in the pool's dtype, scaled where they had another."""
        if values.dtype == self.dtype:
            return values
        return (values if scale is None else values / scale).to(self.dtype)

    def _write(
        self, plane: PlaneBuffer, number: int, loc: torch.Tensor, values: torch.Tensor
    ) -> None:
        loc = self._on_device(loc)
        self._check_rows(plane, loc, values)
        plane.write(number, loc, values)

    def _check_rows(self, plane: PlaneBuffer, loc: torch.Tensor, values: torch.Tensor) -> None:
        needed = loc.numel() * prod(plane.row_shape)
        if values.numel() != needed:
            raise LayoutError(
                f"plane {plane.name!r}: {list(values.shape)} for {loc.numel()} slots of "
                f"{list(plane.row_shape)}"
            )

    def _on_device(self, loc: Any) -> torch.Tensor:
        return slots_on(self._device.torch_device, loc)

    def _local(self, layer_id: int) -> int:
        """A layer's number within this stage. LayoutError for a layer of another stage."""
        first, number = self.start_layer, integer_of(layer_id)
        last = first + self.layer_num - 1
        if number is None or not first <= number <= last:
            raise LayoutError(f"layer {shown(layer_id)} isn't in this stage's {first} … {last}")
        return number - first

    def _place(self, name: str, layer_id: int) -> tuple[PlaneBuffer, int]:
        """The plane of that name, and the layer's index in it. Not all layers have every plane."""
        number = integer_of(layer_id)
        for plane in self._planes:
            if plane.name == name and number is not None and number in plane.layers:
                return plane, list(plane.layers).index(number)
        layers = [layer for plane in self._planes if plane.name == name for layer in plane.layers]
        raise LayoutError(
            f"layer {shown(layer_id)} has no {name!r}; the layers that have it: {layers}"
        )

    def _typed(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.store_dtype == self.dtype else buffer.view(self.dtype)

    def _synchronize(self) -> None:
        """Waits for whatever any stream does to the slots; a ticket waits for its move alone."""
        if self._device.torch_device.type != "cpu":
            torch.accelerator.synchronize(self._device.torch_device)


def _opened(device: str | torch.device | Device) -> Device:
    return open_device(str(device)) if isinstance(device, str | torch.device) else device
