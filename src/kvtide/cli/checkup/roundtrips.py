"""Round trips of every declared layout, with kvtide's public classes alone.

Random bytes, offload, other bytes over the source, restore into other slots. Then every byte of
the pool is compared: those that should have come back, and those that should not have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.arena import HostArena
from kvtide.cli.checkup.finding import Finding, attempt
from kvtide.cli.checkup.here import Opened
from kvtide.device import Device
from kvtide.layout import GQA, Geometry, Layout
from kvtide.layout.spec import DTYPE_BYTES
from kvtide.pool import Pool
from kvtide.tide import Tide

# One line for each new layout: how large its axes are here. Each is tried in every dtype.
SAMPLES: tuple[tuple[Layout, Mapping[str, int]], ...] = (
    (GQA, {"layer": 2, "token": 128, "head": 4, "head_dim": 64, "v_head_dim": 64}),
    (GQA, {"layer": 3, "token": 1, "head": 1, "head_dim": 24, "v_head_dim": 7}),
)

_SLOTS = 512
# Two chunks of 64 and a bit, which is a page of 128 and a bit, too.
_CHUNK_TOKENS = 64
_TOKENS = 2 * _CHUNK_TOKENS + 13

Ids = NDArray[np.int64]
MakePool = Callable[[Geometry, Device], Pool]
Image = dict[tuple[str, int], NDArray[np.uint8]]


@final
@dataclass(frozen=True, slots=True)
class RoundTrip:
    """What came of all round trips with one geometry: the first failure, or none."""

    geometry: Geometry
    finding: Finding


def make_round_trips(opened: Opened) -> Iterator[RoundTrip]:
    """One for each sample and dtype, as it becomes known; none if kvtide can't open the device."""
    if opened.device is None:
        return
    for layout, sizes in SAMPLES:
        for dtype in DTYPE_BYTES:
            geometry = layout.bind(dtype=dtype, **sizes)
            trips = partial(_go_all_ways, geometry, opened.device, opened.synchronize)
            yield RoundTrip(geometry, attempt(layout.name, trips, settle=opened.synchronize))


def make_paths(page_size: int) -> dict[str, tuple[Ids, Ids]]:
    """Slots to offload and slots to restore to, int64 [token] each, by how they lie."""
    random = np.random.default_rng(0)
    page_order = random.permutation(_SLOTS // page_size)
    pages = (page_order[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return {
        "contiguous": (np.arange(5, 5 + _TOKENS), np.arange(_SLOTS - _TOKENS - 3, _SLOTS - 3)),
        "paged": (pages[:_TOKENS], pages[_SLOTS // 2 :][:_TOKENS]),
        "reversed": (pages[:_TOKENS][::-1], np.arange(_TOKENS)[::-1]),
        "scattered": (random.permutation(_SLOTS)[:_TOKENS], random.permutation(_SLOTS)[:_TOKENS]),
    }


def _go_all_ways(geometry: Geometry, device: Device, settle: Callable[[], None]) -> str | None:
    """Each kind of pool, and each way for slots to lie; stops at the first that goes wrong."""
    for kind, make in _POOL_KINDS.items():
        for path, (source, target) in make_paths(geometry.page_size).items():
            go = partial(_go, make, geometry, device, source, target)
            trip = attempt(path, go, settle=settle)
            if trip.reason is not None:
                return f"{kind} pool, {path} slots: {trip.reason}"
    return None


def _go(make: MakePool, geometry: Geometry, device: Device, source: Ids, target: Ids) -> str | None:
    """One round trip; returns where a byte isn't what it should be."""
    pool = make(geometry, device)
    block_bytes = _CHUNK_TOKENS * pool.geometry.token_bytes
    block_count = -(-source.size // _CHUNK_TOKENS)
    arena = HostArena(pool.device, limit_bytes=block_count * block_bytes, block_bytes=block_bytes)
    tide = Tide(pool, arena)
    before, expected = _random_image(pool, 1), _random_image(pool, 2)
    _write(pool, before)
    snapshot = tide.offload(source, key="doctor")
    try:
        # All slots get new bytes: those of the source as their next holder would write them.
        _write(pool, expected)
        tide.restore(snapshot, target, key="doctor")
    finally:
        tide.close()
        tide.discard(snapshot)
    for part, rows in expected.items():
        rows[target] = before[part][source]
    return _first_difference(expected, _read(pool), target)


def _random_image(pool: Pool, seed: int) -> Image:
    """Random bytes for all of a pool, by plane and layer: uint8 [slot, row byte]."""
    random = np.random.default_rng(seed)
    return {
        (plane.name, layer): random.integers(0, 256, (pool.slot_count, plane.row_bytes), np.uint8)
        for plane in pool.geometry.planes
        for layer in range(plane.layer_count)
    }


def _rows(pool: Pool, name: str, layer: int) -> torch.Tensor:
    """A layer's bytes, uint8 [slot, row byte]; a view."""
    return pool.plane(name, layer).view(pool.slot_count, -1).view(torch.uint8)


def _write(pool: Pool, image: Image) -> None:
    for part, rows in image.items():
        _rows(pool, *part).copy_(torch.from_numpy(rows))


def _read(pool: Pool) -> Image:
    return {
        (plane.name, layer): _rows(pool, plane.name, layer).cpu().numpy()
        for plane in pool.geometry.planes
        for layer in range(plane.layer_count)
    }


def _first_difference(expected: Image, found: Image, target: Ids) -> str | None:
    for (name, layer), rows in expected.items():
        places = np.argwhere(rows != found[name, layer])
        if len(places):
            slot, byte = (int(number) for number in places[0])
            which = "restored" if slot in target else "not to be touched"
            return (
                f"plane {name}, layer {layer}, slot {slot} ({which}), byte {byte} is "
                f"{found[name, layer][slot, byte]:#04x}, not {rows[slot, byte]:#04x}; "
                f"{len(places):,} of {rows.size:,} bytes of that layer differ"
            )
    return None


def _create(geometry: Geometry, device: Device) -> Pool:
    return Pool.create(geometry, device, page_count=_SLOTS // geometry.page_size)


def _adopt_slots(geometry: Geometry, device: Device) -> Pool:
    return _adopt(geometry, device, _SLOTS)


def _adopt_pages(geometry: Geometry, device: Device) -> Pool:
    return _adopt(geometry, device, _SLOTS // geometry.page_size, geometry.page_size)


def _adopt(geometry: Geometry, device: Device, *lead: int) -> Pool:
    planes = {
        plane.name: [
            torch.empty(
                (*lead, *plane.row_shape),
                dtype=getattr(torch, plane.dtype),
                device=device.torch_device,
            )
            for _ in range(plane.layer_count)
        ]
        for plane in geometry.planes
    }
    return Pool.adopt(geometry, device, planes)


_POOL_KINDS: dict[str, MakePool] = {
    "created": _create,
    "adopted [slot, …]": _adopt_slots,
    "adopted [page, token, …]": _adopt_pages,
}
