"""Small pools of every NPU kind, and their bytes by tokens. The pools' code isn't used to read.

Each is a stage of three layers that begins at layer 5, with 16 pages of 4 tokens and the padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtide.device import AcceleratorDevice, CPUDevice, Device
from kvtide.npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool, NPUTokenToKVPool

Bytes = NDArray[np.uint8]
Image = dict[tuple[str, int], Bytes]
"""For each plane and each of its layers in the stage: uint8 [slot, token byte]."""

POISON = 0xA5
CHUNK, LIMIT_BYTES = 8, 1 << 16
# Two chunks of an accelerator. To pin a slab of the usual size takes long.
FEW_CHUNKS_BYTES = 2 * AcceleratorDevice.chunk_bytes
FIRST_LAYER, LAYER_COUNT, PAGE_SIZE, SLOT_COUNT = 5, 3, 4, 68
INDEX_LAYERS = (5, 7)
STAGE: dict[str, Any] = {
    "size": 64,
    "page_size": PAGE_SIZE,
    "layer_num": LAYER_COUNT,
    "start_layer": FIRST_LAYER,
    "enable_memory_saver": False,
}


class AnyLayer:
    """An attention layer with what a pool reads of it."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id


def mha(device: Any, **changes: Any) -> NPUMHATokenToKVPool:
    """Makes a pool whose keys are wider than its values."""
    sizes = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 6, "v_head_dim": 3}
    return NPUMHATokenToKVPool(**{**STAGE, **sizes, "device": device, **changes})


def mla(device: Any, **changes: Any) -> NPUMLATokenToKVPool:
    """Makes a pool whose latents are twice as wide as the rotary keys."""
    sizes = {"dtype": torch.bfloat16, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    return NPUMLATokenToKVPool(**{**STAGE, **sizes, "device": device, **changes})


def packed(device: Any, **changes: Any) -> NPUMLATokenToKVPool:
    """Makes a pool of records of 148 bytes: 128 of latent, 16 of rotary key, and a scale."""
    sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 8, "kv_cache_dim": 148, "index_head_dim": 8}
    return mla(device, **{"dtype": torch.float8_e4m3fn, **sizes, **changes})


_INDEX = {"index_head_dim": 8, "indexer_layer_ids": INDEX_LAYERS}
KINDS: dict[str, Callable[..., NPUTokenToKVPool]] = {
    "mha": mha,
    "mha_narrow_keys": lambda device, **changes: mha(
        device, **{"head_dim": 3, "v_head_dim": 8, **changes}
    ),
    "mha_fia": lambda device, **changes: mha(device, **{"use_fia": True, **changes}),
    "mha_fp8": lambda device, **changes: mha(device, **{"dtype": torch.float8_e5m2, **changes}),
    "mla": mla,
    "mla_fia": lambda device, **changes: mla(device, **{"use_fia": True, **_INDEX, **changes}),
    "mla_fp8": lambda device, **changes: mla(device, **{"dtype": torch.float8_e4m3fn, **changes}),
    "mla_index": lambda device, **changes: mla(device, **{**_INDEX, **changes}),
    "mla_nz": lambda device, **changes: mla(
        device, **{"use_fia_nz": True, "qk_rope_head_dim": 32, **changes}
    ),
    "mla_nz_index": lambda device, **changes: mla(
        device, **{"use_fia_nz": True, **_INDEX, **changes}
    ),
    "packed": packed,
    "packed_some": lambda device, **changes: packed(
        device, **{"indexer_layer_ids": INDEX_LAYERS, **changes}
    ),
}
TILED = ("mla_nz", "mla_nz_index")


def small_device(name: str, chunk_bytes: int) -> Device:
    """Opens a device that moves so little at once that a small copy has many chunks."""
    device: Any = CPUDevice(lanes=1) if name == "cpu" else AcceleratorDevice(name)
    device.chunk_bytes = chunk_bytes
    opened: Device = device
    return opened


def planes_of(pool: NPUTokenToKVPool) -> list[tuple[str, int, torch.Tensor]]:
    """Lists (plane, number of the layer in the stage, tensor) in the order of a copy's lists."""
    found = [
        (name, layer, buffer[layer])
        for name, buffer in (("k", pool.k_buffer), ("v", pool.v_buffer))
        for layer in range(LAYER_COUNT)
    ]
    for name in ("index_k", "index_k_scale"):
        buffer = getattr(pool, f"{name}_buffer", None)
        layers = getattr(pool, "indexer_layer_ids", ())
        if buffer is not None:
            found += [
                (name, id_ - FIRST_LAYER, layer) for id_, layer in zip(layers, buffer, strict=True)
            ]
    return found


def is_tiled(pool: NPUTokenToKVPool, plane: str) -> bool:
    """Returns whether a page of the plane lies in tiles of 16 columns; a single tile has tokens."""
    widths = {"k": "kv_lora_rank", "v": "qk_rope_head_dim"}
    return getattr(pool, "use_fia_nz", False) and getattr(pool, widths.get(plane, ""), 0) > 16


def image_of(pool: NPUTokenToKVPool) -> Image:
    """Copies every byte of the pool, by tokens."""
    image: Image = {}
    for name, layer, tensor in planes_of(pool):
        if not tensor.numel():
            continue
        rows = tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(SLOT_COUNT, -1).copy()
        if is_tiled(pool, name):
            tiles = rows.shape[1] // 32
            paged = rows.reshape(-1, tiles, PAGE_SIZE, 32).transpose(0, 2, 1, 3)
            rows = np.ascontiguousarray(paged).reshape(SLOT_COUNT, -1)
        image[name, layer] = rows
    return image


def scramble(pool: NPUTokenToKVPool, seed: int) -> None:
    """Writes random bytes everywhere: NaNs of all payloads, infinities, and -0."""
    rng = np.random.default_rng(seed)
    for _, _, tensor in planes_of(pool):
        if tensor.numel():
            random_bytes = rng.integers(0, 256, tensor.nbytes, np.uint8)
            flat = tensor.view(torch.uint8).view(-1)
            flat.copy_(torch.from_numpy(random_bytes))


def poison(pool: NPUTokenToKVPool, slots: list[int]) -> None:
    """Overwrites the whole pages of these slots, as a later request would, without waiting."""
    pages = torch.tensor(sorted({slot // PAGE_SIZE for slot in slots}), dtype=torch.int64)
    for _, _, tensor in planes_of(pool):
        if tensor.numel():
            rows = tensor.view(torch.uint8).view(SLOT_COUNT // PAGE_SIZE, -1)
            rows.index_fill_(0, pages.to(tensor.device), POISON)


def with_tokens(
    pool: NPUTokenToKVPool, image: Image, target: list[int], saved: Image, source: list[int]
) -> Image:
    """Returns `image` as it must be after `source` of `saved` was loaded to `target`.

    In planes in tiles the last page arrives whole: its bytes after the last token belong to the
    request, too.
    """
    expected = {part: rows.copy() for part, rows in image.items()}
    for part, rows in expected.items():
        ends = (target, source)
        if is_tiled(pool, part[0]):
            ends = (_whole_pages(target), _whole_pages(source))
        rows[ends[0]] = saved[part][ends[1]]
    return expected


def _whole_pages(slots: list[int]) -> list[int]:
    pages = dict.fromkeys(slot // PAGE_SIZE for slot in slots)
    return [page * PAGE_SIZE + token for page in pages for token in range(PAGE_SIZE)]


def differences(expected: Image, actual: Image) -> list[tuple[str, int, int]]:
    """Lists (plane, layer, slot) of all tokens whose bytes differ."""
    assert expected.keys() == actual.keys()
    return [
        (*part, int(slot))
        for part, rows in expected.items()
        for slot in np.flatnonzero((rows != actual[part]).any(axis=1))
    ]


def slots_for(kind: str, count: int, style: str, pages: range) -> list[int]:
    """Makes `count` distinct slots of these pages; whole pages if the kind's rows are pages."""
    slots = [page * PAGE_SIZE + token for page in pages for token in range(PAGE_SIZE)]
    if style == "run":
        return slots[:count]
    order = random.Random(count).sample(list(pages), len(pages))
    shuffled = [page * PAGE_SIZE + token for page in order for token in range(PAGE_SIZE)]
    if kind in TILED or style == "pages":
        return shuffled[:count]
    if style == "reversed":
        return slots[::-1][:count]
    return random.Random(count).sample(slots, count)


def saved(kind: str, device: Any = "cpu", **changes: Any) -> tuple[NPUTokenToKVPool, Image]:
    """Makes a pool of that kind with random bytes, and returns it with them."""
    pool = KINDS[kind](device, **{"host_limit_bytes": FEW_CHUNKS_BYTES, **changes})
    pool.cpu_offloading_chunk_size = CHUNK
    scramble(pool, 1)
    return pool, image_of(pool)


def refuses(
    pool: NPUTokenToKVPool, copy: Any, slots: Any, error: type[Exception], text: str
) -> None:
    """Asserts that a load raises the error and writes nothing."""
    before = image_of(pool)
    with pytest.raises(error, match=text):
        pool.load_cpu_copy(copy, slots)
    assert [] == differences(before, image_of(pool))
