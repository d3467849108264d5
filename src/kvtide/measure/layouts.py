"""Measures how fast the rows of each declared layout move, with row sizes of real models.

Slots are in scattered pages of 64 tokens (128 if so many share a row), as a paged allocator leaves
them. Blocks are as large as an arena makes them for such a pool. Each layout is measured in turns
with a memcpy of as many bytes; ratios are of bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch

from kvtide.arena import HostArena
from kvtide.conformance.reference import units_of
from kvtide.conformance.samples import SAMPLES
from kvtide.device import Device, open_device
from kvtide.form import chunk_sizes
from kvtide.layout import Geometry, Layout
from kvtide.measure.copies import make_moves, memcpy_to_json, ratios_to_json
from kvtide.measure.timing import Timing, time_in_turns
from kvtide.measure.workload import PAGE_SIZE, POOL_SHARE
from kvtide.pool import Pool
from kvtide.transfer import Mover, chunk_bytes_for

# An arena of this size has blocks of the best size.
_ARENA_BYTES = 1 << 30

# Sizes of axes: of an 8B model for attention with heads, of DeepSeek-V3 for latents, of Qwen3-Next
# for recurrent state, of SGLang's pools for scales and index keys.
_AXES: Mapping[str, int] = {
    "layer": 4, "head": 8, "head_dim": 128, "v_head_dim": 128,
    "k_scale_dim": 1, "v_scale_dim": 1, "packed_dim": 64, "v_packed_dim": 64,
    "scale_block": 4, "v_scale_block": 4, "scale_dim": 16,
    "latent_dim": 576, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "record_bytes": 656,
    "latent_tile": 32, "rope_tile": 4, "index_layer": 4, "index_head_dim": 128,
    "index_scale_dim": 1, "index_page_bytes": 64 * 132, "tail_layer": 4, "tail_token": 64,
    "channel": 8192, "width": 3, "state": 128, "ring": 128,
}  # fmt: skip
_LAYERS = 4
_WIDTH = 64
"""The sizes of axes that aren't listed: a new layout may have new axes."""


@final
@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """The times of one layout's moves and of its `memcpy`; each moved `size_bytes`.

    `row_bytes` has the row sizes of its narrowest and its widest plane.
    """

    name: str
    size_bytes: int
    row_bytes: tuple[int, int]
    memcpy: Timing
    moves: Mapping[str, Timing]

    def to_json(self) -> dict[str, Any]:
        """Ratios of bandwidth to memcpy's; `seal_ratio` is a ratio of times, sealed to unsealed."""
        return {
            "layout": self.name,
            "row_bytes": list(self.row_bytes),
            "size_bytes": self.size_bytes,
            **memcpy_to_json(self.memcpy, self.size_bytes),
            **ratios_to_json(self.memcpy, self.moves),
        }


def declared_layouts() -> list[Layout]:
    """Every layout that kvtide declares, once. A test finds layouts without a sample."""
    return list({sample.layout.name: sample.layout for sample in SAMPLES}.values())


def bind_for_models(layout: Layout, **sizes: int) -> Geometry:
    """Binds a layout, optional planes included, to usual sizes; `sizes` replaces some of them.

    A page is as long as `PAGE_SIZE`, or longer so that tokens that must stay together share a page.
    """
    axes = {axis for plane in layout.planes for axis in plane.sized_axes} - {"token"}
    usual: dict[str, Any] = {axis: size_of_axis(axis) for axis in axes}
    shared = [rule.tokens_per_row for plane in layout.planes for rule in plane.rows]
    bind = partial(layout.bind, dtype="bfloat16", **(usual | sizes))
    token = max(PAGE_SIZE, *shared, 1)
    unit = units_of(bind(token=token)).slots
    return bind(token=-(-token // unit) * unit)


def size_of_axis(axis: str) -> int:
    """The usual size of an axis, also with a joined layout's prefix: full_layer, draft_head_dim."""
    for name in (axis, axis.partition("_")[2]):
        if name in _AXES:
            return _AXES[name]
    return _LAYERS if axis.endswith("layer") else _WIDTH


def bind_for_size(layout: Layout, size_bytes: int) -> Geometry:
    """Binds a layout to usual sizes. If a request has only one row in each layer, there are as many
    layers as are needed to move about `size_bytes`."""
    geometry = bind_for_models(layout)
    if geometry.page_bytes:
        return geometry
    layer_bytes = sum(plane.row_bytes for plane in geometry.planes)
    return bind_for_models(layout, layer=max(1, round(size_bytes / layer_bytes)))


def measure_layouts(size_bytes: int, rounds: int) -> Iterator[LayoutFigures]:
    """Measures each declared layout with about `size_bytes`; gives the figures one by one."""
    with closing(open_device("cpu")) as device:
        for layout in declared_layouts():
            yield _measure(bind_for_size(layout, size_bytes), device, size_bytes, rounds)


def _measure(geometry: Geometry, device: Device, size_bytes: int, rounds: int) -> LayoutFigures:
    # A layout of recurrent state alone has no pages; then the rows of one request move.
    page_count = max(1, size_bytes // geometry.page_bytes) if geometry.page_bytes else 1
    pool = _make_pool(geometry, device, page_count)
    pages = np.random.default_rng(0).permutation(np.arange(1, pool.page_count))[:page_count]
    page_size = geometry.page_size
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    rows = [group.ids for group in pool.rows_of(slots, 1 if pool.request_kinds else None)]
    mover, block_bytes = Mover(pool), chunk_bytes_for(pool, _ARENA_BYTES)
    sizes = [*chunk_sizes(mover.sections(block_bytes), [ids.size for ids in rows])]
    count, moved_bytes = len(sizes), sum(sizes)
    arena = HostArena(device, limit_bytes=count * block_bytes, block_bytes=block_bytes)
    lease = arena.lease(count)
    moves = make_moves(pool, rows, lease.blocks, chunk_bytes=block_bytes)
    source = torch.ones(moved_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    timings = time_in_turns(
        {("", "memcpy"): lambda: target.copy_(source)}
        | {("moves", name): call for name, call in moves.items()},
        rounds,
    )
    lease.release()
    widths = [plane.row_bytes for plane in geometry.planes]
    return LayoutFigures(
        geometry.layout.name,
        moved_bytes,
        (min(widths), max(widths)),
        timings["", "memcpy"],
        {name: timings["moves", name] for name in moves},
    )


def _make_pool(geometry: Geometry, device: Device, moved_pages: int) -> Pool:
    """A filled pool, POOL_SHARE times as large as the moved pages. Its maps map slot n to row n."""
    page_count = POOL_SHARE * moved_pages + 1
    names = {
        rule.map_name
        for plane in geometry.planes
        for rule in plane.rules
        if rule.map_name is not None
    }
    slot_count = page_count * geometry.page_size
    pool = Pool.create(
        geometry,
        device,
        page_count=page_count,
        request_count=2,
        maps={name: np.arange(slot_count) for name in names},
        mapped_rows=dict.fromkeys(names, slot_count),
    )
    for buffer in pool.buffers:
        buffer.copy_(torch.randint(256, (buffer.numel(),), dtype=torch.uint8))
    return pool
