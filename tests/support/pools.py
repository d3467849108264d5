"""Pools of every kind with known bytes, and the bytes that a copy must give, without a mover."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvtide.conformance.reference import Bytes as Bytes
from kvtide.conformance.reference import Image as Image
from kvtide.conformance.reference import first_difference
from kvtide.device import Device
from kvtide.layout import GQA, Geometry
from kvtide.pool import Pool

POOL_KINDS = ("created", "layers", "pages", "slices")
POISON = 0xA5


def small_geometry(**changes: Any) -> Geometry:
    """Binds two layers with rows of 12 and of 6 bytes, and pages of 4 tokens: 36 bytes a token."""
    arguments: dict[str, Any] = {
        "dtype": "bfloat16", "layer": 2, "token": 4, "head": 1, "head_dim": 6, "v_head_dim": 3
    }  # fmt: skip
    return GQA.bind(**{**arguments, **changes})


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draws GQA of any dtype, with k and v of unequal width and rows of odd and even bytes."""
    width = st.sampled_from((1, 2, 3, 5, 7, 8, 12, 16, 33))
    return GQA.bind(
        dtype=draw(st.sampled_from(("uint8", "bfloat16", "float16", "float32"))),
        layer=draw(st.integers(1, 4)),
        token=draw(st.sampled_from((1, 2, 3, 4, 8, 16))),
        head=draw(st.integers(1, 3)),
        head_dim=draw(width),
        v_head_dim=draw(width),
    )


@dataclass(frozen=True)
class PoolCase:
    """A pool, and all memory of its tensors with the gaps between them."""

    pool: Pool
    memory: tuple[Bytes, ...]


def make_pool(kind: str, geometry: Geometry, device: Device, page_count: int) -> PoolCase:
    """Makes a zeroed pool: created, or adopted in one of the forms that engines use."""
    if kind == "created":
        pool = Pool.create(geometry, device, page_count=page_count)
        return PoolCase(pool, tuple(buffer.numpy() for buffer in pool.buffers))
    slot_count = page_count * geometry.page_size
    lead = (page_count, geometry.page_size) if kind == "pages" else (slot_count,)
    planes: dict[str, list[torch.Tensor]] = {}
    memory: list[Bytes] = []
    for plane in geometry.planes:
        shape = (*lead, *plane.row_shape)
        dtype = getattr(torch, plane.dtype)
        if kind == "slices":
            storage, tensors = _slices(shape, dtype, plane.layer_count)
            memory.append(storage)
        else:
            tensors = [torch.zeros(shape, dtype=dtype) for _ in range(plane.layer_count)]
            memory += [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
        planes[plane.name] = tensors
    return PoolCase(Pool.adopt(geometry, device, planes), tuple(memory))


def _slices(
    shape: tuple[int, ...], dtype: torch.dtype, count: int
) -> tuple[Bytes, list[torch.Tensor]]:
    """Makes tensors inside one piece of memory, at odd addresses, with gaps between them."""
    size_bytes = prod(shape) * dtype.itemsize
    memory = bytearray(3 + count * (size_bytes + 5))
    tensors = [
        torch.frombuffer(
            memory, dtype=dtype, count=prod(shape), offset=3 + number * (size_bytes + 5)
        ).view(shape)
        for number in range(count)
    ]
    return np.frombuffer(memory, np.uint8), tensors


def rows_of(pool: Pool, name: str, layer: int) -> Bytes:
    """Returns the bytes of one layer of a plane, uint8 [slot, row byte]; writes go to the pool."""
    rows: Bytes = _bytes_of(pool, name, layer).numpy()
    return rows


def _bytes_of(pool: Pool, name: str, layer: int) -> torch.Tensor:
    plane = pool.plane(name, layer)
    return plane.view(-1).view(torch.uint8).view(pool.slot_count, -1)


def parts_of(pool: Pool) -> list[tuple[str, int]]:
    """Lists the pool's planes and layers in the order in which a chunk has them."""
    return [(p.name, layer) for p in pool.geometry.planes for layer in range(p.layer_count)]


def image_of(pool: Pool) -> Image:
    """Copies every byte of the pool's slots, on any device."""
    return {part: _bytes_of(pool, *part).cpu().numpy().copy() for part in parts_of(pool)}


def scramble(pool: Pool, seed: int) -> None:
    """Writes random bytes into all slots on any device; a created CPU pool gets those of `fill`."""
    rng = np.random.default_rng(seed)
    for buffer in pool.buffers:
        buffer.copy_(torch.from_numpy(rng.integers(0, 256, buffer.numel(), np.uint8)))


def fill(case: PoolCase, seed: int) -> None:
    """Writes random bytes everywhere, also into gaps: NaNs of all payloads, infinities, and -0."""
    rng = np.random.default_rng(seed)
    for memory in case.memory:
        memory[:] = rng.integers(0, 256, memory.size, np.uint8)


def poison(pool: Pool, slots: Any) -> None:
    """Overwrites the slots' bytes as a later request would, on any device, without waiting."""
    index = torch.from_numpy(np.array(slots, np.int64)).to(pool.device.torch_device)
    for part in parts_of(pool):
        _bytes_of(pool, *part).index_fill_(0, index, POISON)


def with_rows(image: Image, slots: Any, saved: Image, saved_slots: Any) -> Image:
    """Returns `image` as it must be after `saved_slots` of `saved` were restored to `slots`."""
    expected = {part: rows.copy() for part, rows in image.items()}
    for part, rows in expected.items():
        rows[np.asarray(slots, np.int64)] = saved[part][np.asarray(saved_slots, np.int64)]
    return expected


def same_image(expected: Image, actual: Image) -> bool:
    """Returns whether every byte is equal, by the kit's comparison."""
    return first_difference(expected, actual) is None


def chunk_bytes(image: Image, slots: Any) -> bytes:
    """Returns a chunk's bytes by the format: for each plane and layer, one row for each token."""
    return b"".join(rows[slot].tobytes() for rows in image.values() for slot in slots)


@st.composite
def slot_lists(draw: st.DrawFn, slot_count: int, page_size: int, count: int) -> list[int]:
    """Draws `count` distinct slots in orders that engines use, and in others.

    A shuffle is drawn as one number, not as a permutation: then a failing example is made small in
    seconds, not in minutes.
    """
    style = draw(st.sampled_from(("run", "pages", "scattered", "reversed", "stitched", "ragged")))
    rng = random.Random(draw(st.integers(0, 2**16)))
    if style == "run":
        first = rng.randint(0, slot_count - count)
        return list(range(first, first + count))
    if style == "scattered":
        return rng.sample(range(slot_count), count)
    if style == "ragged":
        # Runs of equal length, which begin at different places.
        length, slots = rng.choice((2, 3, 4, 8)), list[int]()
        for first in _shuffled(range(0, slot_count - 2 * length + 1, 2 * length), rng):
            start = first + rng.randint(0, length)
            slots += range(start, start + length)
        return [*slots, *sorted(set(range(slot_count)) - set(slots))][:count]
    pages = _shuffled(range(slot_count // page_size), rng)
    slots = [page * page_size + i for page in pages for i in range(page_size)]
    if style == "stitched":
        # Pages of the pool, but shifted: unaligned runs of a page's length.
        shift = rng.randint(0, page_size - 1)
        return [(slot + shift) % slot_count for slot in slots][:count]
    return slots[:count][::-1] if style == "reversed" else slots[:count]


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    return rng.sample(values, len(values))
