"""The form of a CPU copy, its memory, and plain lists in its place."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.errors import ArenaFull, LayoutError, SlotsLost
from kvtide.npu import CPUCopy, NPUTokenToKVPool
from support.broken_devices import BreakingDevice
from support.npu_pools import (
    CHUNK,
    INDEX_LAYERS,
    KINDS,
    LAYER_COUNT,
    LIMIT_BYTES,
    PAGE_SIZE,
    SLOT_COUNT,
    TILED,
    Image,
    differences,
    image_of,
    is_tiled,
    mha,
    planes_of,
    poison,
    refuses,
    saved,
    scramble,
    slots_for,
    small_device,
    with_tokens,
)
from support.simulated import simulated

# ---- the form of a copy ----------------------------------------------------------------------

NAMES = {
    "mha": ["k", "v"],
    "mla": ["k", "v"],
    "mla_fp8": ["k", "v"],
    "mla_index": ["k", "v", "index_k"],
    "mla_nz_index": ["k", "v", "index_k"],
    "packed_some": ["k", "v", "index_k", "index_k_scale"],
}


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("chunk_bytes", [40, 700, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_reads_as_lists_by_layer_and_chunk(kind: str, chunk_bytes: int, count: int) -> None:
    """Tokens are in the order of the slots; each chunk but the last has the set number of them."""
    device = small_device("cpu", chunk_bytes)
    pool, before = saved(kind, device, host_limit_bytes=LIMIT_BYTES + 4 * device.chunk_bytes)
    source = slots_for(kind, count, "any", range(1, 17))
    copy = pool.get_cpu_copy(source)
    poison(pool, source)
    assert LAYER_COUNT == len(copy)
    for layer in range(LAYER_COUNT):
        chunks = list(copy[layer])
        assert -(-count // CHUNK) == len(copy[layer]) == len(chunks)
        for number, chunk in enumerate(chunks):
            slots = source[number * CHUNK : (number + 1) * CHUNK]
            expected = [rows[slots] for (_, number), rows in before.items() if number == layer]
            found = [tensor.view(torch.uint8).numpy().reshape(len(slots), -1) for tensor in chunk]
            wide = [tensor for tensor in found if tensor.size]
            assert all((a == b).all() for a, b in zip(expected, wide, strict=True))
    device.close()


@pytest.mark.parametrize("kind", NAMES)
def test_a_chunk_is_a_list_of_tensors_by_token(kind: str) -> None:
    """Tensors are [token, head, dim] on the host, in the stored dtype; fp8 is given as bytes."""
    pool, _ = saved(kind)
    copy = pool.get_cpu_copy(list(range(4, 15)))
    tensors = {(name, layer): tensor for name, layer, tensor in planes_of(pool)}
    for layer in range(LAYER_COUNT):
        names = [name for name in NAMES[kind] if (name, layer) in tensors]
        chunk = copy[layer][1]
        assert type(chunk) is list
        rows = [tuple(tensors[name, layer].shape[2:]) for name in names]
        assert [(3, *row) for row in rows] == [tuple(tensor.shape) for tensor in chunk]
        dtypes = [tensors[name, layer].dtype for name in names]
        stored = [torch.uint8 if dtype is torch.float8_e4m3fn else dtype for dtype in dtypes]
        assert stored == [tensor.dtype for tensor in chunk]
        assert {"cpu"} == {tensor.device.type for tensor in chunk}


def test_only_layers_with_index_keys_have_them_in_their_lists() -> None:
    """Layer 6 has no index keys, and gets none of another layer."""
    pool, _ = saved("mla_index")
    copy = pool.get_cpu_copy([8])
    assert [3, 2, 3] == [len(copy[layer][0]) for layer in range(3)]
    assert (5, 7) == INDEX_LAYERS


def test_packed_records_have_a_second_plane_without_width() -> None:
    """Engines count the tensors, so the empty tensor is in the list."""
    pool, _ = saved("packed")
    record, nothing, key, scale = pool.get_cpu_copy([8, 9])[1][0]
    shapes = [(2, 1, 148), (2, 1, 0), (2, 1, 8), (2, 1)]
    assert shapes == [tuple(tensor.shape) for tensor in (record, nothing, key, scale)]


def test_a_copy_keeps_the_chunk_size_of_its_making() -> None:
    """A later chunk size changes neither the copy's lists nor what is loaded."""
    pool, before = saved("mha")
    copy = pool.get_cpu_copy(list(range(4, 17)))
    pool.cpu_offloading_chunk_size = 3
    assert [8, 5] == [len(chunk[0]) for chunk in copy[0]]
    pool.load_cpu_copy(copy, list(range(24, 37)))
    expected = with_tokens(pool, before, list(range(24, 37)), before, list(range(4, 17)))
    assert [] == differences(expected, image_of(pool))
    assert 8192 == mha("cpu").cpu_offloading_chunk_size


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_chunk_size_is_an_integer_from_1(size: Any) -> None:
    """Any other value is refused and changes nothing."""
    pool = mha("cpu")
    with pytest.raises(LayoutError, match="cpu_offloading_chunk_size"):
        pool.cpu_offloading_chunk_size = size
    assert 8192 == pool.cpu_offloading_chunk_size


def test_unknown_layers_and_chunks_raise_index_error() -> None:
    """Such an error also ends a loop over them."""
    copy = saved("mha")[0].get_cpu_copy([4])
    for read in (lambda: copy[3], lambda: copy[0][1], lambda: copy[-4]):
        with pytest.raises(IndexError):
            read()


def test_tensors_that_were_read_are_copies() -> None:
    """Writing to them doesn't change the snapshot, and they outlive the copy."""
    pool, before = saved("mha")
    copy = pool.get_cpu_copy([4, 5])
    mine = copy[0][0]
    mine[0].zero_()
    pool.load_cpu_copy(copy, [8, 9])
    assert [] == differences(with_tokens(pool, before, [8, 9], before, [4, 5]), image_of(pool))
    copy.release()
    scramble(pool, 3)
    pool.get_cpu_copy([12, 13])
    assert before["v", 0][[4, 5]].tobytes() == mine[1].view(torch.uint8).numpy().tobytes()


# ---- host memory -----------------------------------------------------------------------------


def test_host_memory_is_given_back() -> None:
    """`release` may be called twice; dropping the copy gives the memory back, too."""
    pool, _ = saved("mha")
    copy = pool.get_cpu_copy([4])
    assert 1 << 20 == pool.host_used_bytes
    copy.release()
    copy.release()
    assert 0 == pool.host_used_bytes
    layer = pool.get_cpu_copy([4])[0]
    assert (1, 1 << 20) == (len(layer[0][0]), pool.host_used_bytes)
    del layer
    assert 0 == pool.host_used_bytes


def test_a_full_host_refuses_and_takes_nothing() -> None:
    """Another request's copy stays whole, and its memory can be used again later."""
    device = small_device("cpu", 1024)
    pool, before = saved("mha", device, host_limit_bytes=3072)
    copy = pool.get_cpu_copy(list(range(4, 24)))
    with pytest.raises(ArenaFull, match="3072"):
        pool.get_cpu_copy([4])
    pool.load_cpu_copy(copy, list(range(30, 50)))
    expected = with_tokens(pool, before, list(range(30, 50)), before, list(range(4, 24)))
    assert [] == differences(expected, image_of(pool))
    copy.release()
    pool.get_cpu_copy([4])
    device.close()


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_load_that_fails_midway_says_that_its_slots_are_lost(as_lists: bool) -> None:
    """No other slot changes, no host memory is kept, and the copy can be loaded again."""
    device = BreakingDevice()
    device.chunk_bytes = 700
    pool, before = saved("mha", device, host_limit_bytes=LIMIT_BYTES)
    source, target = list(range(4, 24)), list(range(30, 50))
    copy = pool.get_cpu_copy(source)
    given = lists_of(copy) if as_lists else copy
    used_bytes, device.breaks_at = pool.host_used_bytes, 1
    with pytest.raises(SlotsLost, match=r"OSError: the link is down.*neither"):
        pool.load_cpu_copy(given, target)
    assert used_bytes == pool.host_used_bytes
    after = image_of(pool)
    others = [slot for slot in range(SLOT_COUNT) if slot not in target]
    assert all(np.array_equal(rows[others], after[part][others]) for part, rows in before.items())
    device.breaks_at = None
    pool.load_cpu_copy(given, target)
    assert [] == differences(with_tokens(pool, before, target, before, source), image_of(pool))
    copy.release()
    device.close()


# ---- lists as engines hold them ----------------------------------------------------------------


def lists_of(copy: CPUCopy) -> list[Any]:
    """Makes plain lists of plain tensors from a copy."""
    return [list(copy[layer]) for layer in range(len(copy))]


@pytest.mark.parametrize("count", [0, 1, CHUNK, CHUNK + 3])
@pytest.mark.parametrize("where", ["cpu", "npu"])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_lists_are_loaded_too(kind: str, where: str, count: int) -> None:
    """Their chunks may have any length, and no host memory is kept."""
    with simulated("lazy"):
        pool, before = saved(kind, where)
        source = slots_for(kind, count, "run", range(1, 8))
        target = slots_for(kind, count, "any", range(8, 17))
        lists = lists_of(pool.get_cpu_copy(source))
        pool.cpu_offloading_chunk_size = 3
        pool.load_cpu_copy(lists, target)
        expected = with_tokens(pool, before, target, before, source)
        if kind in TILED:
            expected = without_tails(pool, expected, target)
        assert [] == differences(expected, image_of(pool))
        assert 0 == pool.host_used_bytes
        pool.close()


def without_tails(pool: NPUTokenToKVPool, image: Image, slots: list[int]) -> Image:
    """Plain lists lack the bytes after the last token of a page in tiles: these become zeros."""
    tail = [
        slot for slot in range(68) if slot // PAGE_SIZE in {held // PAGE_SIZE for held in slots}
    ]
    for name in filter(partial(is_tiled, pool), ("k", "v")):
        for layer in range(LAYER_COUNT):
            image[name, layer][sorted(set(tail) - set(slots))] = 0
    return image


def spoiled(lists: list[Any], how: str) -> Any:
    """Makes lists with an invalid form."""
    keys, values = lists[1][1]
    lists[1][1] = {
        "short": [keys[:-1], values[:-1]],
        "unequal": [keys, values[:-1]],
        "width": [keys, torch.cat([values, values], -1)],
        "dtype": [keys.float(), values],
        "dropped": [keys],
        "flat": [keys.flatten(1), values],
        "none": [keys, None],
        "scalar": [keys, torch.tensor(1.0)],
        "tensor": keys,
        "elsewhere": [keys, values.to("meta")],
        "fine": [keys, values],
    }[how]
    if how == "tensor":
        return keys
    return lists


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("short", "layer 1: 12 tokens for 13"),
        ("unequal", "tensors of"),
        ("width", "layer 1, chunk 1, 'v'"),
        ("dtype", "float32"),
        ("dropped", r"isn't a list of \['k', 'v'\]"),
        ("flat", "layer 1, chunk 1, 'k'"),
        ("none", "NoneType"),
        ("scalar", "layer 1, chunk 1, 'v'"),
        ("tensor", "Tensor"),
        ("elsewhere", "meta"),
    ],
)
def test_lists_with_an_invalid_form_are_refused(how: str, text: str) -> None:
    """The error names what is wrong, and no byte is written."""
    pool, _ = saved("mha")
    source = list(range(4, 17))
    refuses(pool, spoiled(lists_of(pool.get_cpu_copy(source)), how), source, LayoutError, text)
    pool.load_cpu_copy(spoiled(lists_of(pool.get_cpu_copy(source)), "fine"), source)
    assert 0 == pool.host_used_bytes


def test_lists_with_other_layer_counts_are_refused() -> None:
    """The error has both numbers of layers, or the type that isn't a list."""
    pool, _ = saved("mha")
    lists = lists_of(pool.get_cpu_copy([4]))
    refuses(pool, lists[:2], [4], LayoutError, "2 layers, the pool has 3")
    refuses(pool, [*lists, lists[0]], [4], LayoutError, "4 layers")
    refuses(pool, None, [4], LayoutError, "NoneType")
    refuses(pool, [lists[0], lists[1], None], [4], LayoutError, "layer 2: NoneType")
    refuses(pool, lists, [4, 5], LayoutError, "1 tokens for 2 slots")


def test_index_keys_in_lists_are_neither_dropped_nor_made_up() -> None:
    """A layer with index keys has three tensors, and a layer without has two."""
    pool, _ = saved("mla_index")
    lists = lists_of(pool.get_cpu_copy([4]))
    refuses(pool, [lists[0], lists[0], lists[2]], [4], LayoutError, "layer 1")
    refuses(pool, [lists[1], lists[1], lists[2]], [4], LayoutError, "layer 0")
