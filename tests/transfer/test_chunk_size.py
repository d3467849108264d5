from __future__ import annotations

import torch

from kvtide.device import CPUDevice
from kvtide.layout import GQA, Layout, OfRequest, Plane
from kvtide.layout.quantized import GQA_SCALED
from kvtide.pool import Pool
from kvtide.transfer import chunk_bytes_for

GEOMETRY = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=5, v_head_dim=5)


def test_chunks_are_whole_tokens_and_at_most_a_16th_of_a_small_arena() -> None:
    """A token has 10 bytes, and tokens come in multiples of 64.

    111,360 of them fit into what a CPU moves at once and a 16th more, and 13,056 into 128 KiB.
    """
    device = CPUDevice(lanes=1)
    pool = Pool.create(GEOMETRY, device, page_count=1)
    assert 10 * 111_360 == chunk_bytes_for(pool, 1 << 30)
    assert 10 * 13_056 == chunk_bytes_for(pool, 2 << 20)
    device.close()


def in_layers(layers: int, device: CPUDevice) -> Pool:
    """Makes a pool of 10 bytes for each token and layer, in two buffers for each layer."""
    geometry = GQA.bind(dtype="uint8", layer=layers, token=4, head=1, head_dim=5, v_head_dim=5)
    planes = {name: list(torch.zeros(layers, 8, 1, 5).byte()) for name in ("k", "v")}
    return Pool.adopt(geometry, device, planes)


def test_chunks_are_larger_for_a_pool_in_many_buffers() -> None:
    """Each buffer needs a call for every chunk. A maximum and the arena's limit bound the size."""
    device = CPUDevice(lanes=1)
    sizes = [chunk_bytes_for(in_layers(n, device), 1 << 30) for n in (1, 10, 100)]
    assert [10 * 111_360, 100 * 55_680, 1000 * 17_792] == sizes
    assert 100 * 10_432 == chunk_bytes_for(in_layers(10, device), 16 << 20)
    device.close()


def test_scales_beside_values_do_not_halve_a_chunk() -> None:
    """Without scales, 64 tokens are as much as a CPU moves at once."""
    device = CPUDevice(lanes=1)
    values = {"layer": 4, "token": 64, "head": 8, "head_dim": 256, "v_head_dim": 256}
    alone = GQA.bind(dtype="uint8", **values)
    scaled = GQA_SCALED.bind(dtype="uint8", k_scale_dim=1, v_scale_dim=1, **values)
    sizes = [
        chunk_bytes_for(Pool.create(geometry, device, page_count=1), 1 << 30)
        for geometry in (alone, scaled)
    ]
    assert [64 * alone.token_bytes, 64 * scaled.token_bytes] == sizes
    assert [1 << 20, 65 << 14] == sizes
    device.close()


def test_a_chunk_holds_the_largest_row() -> None:
    """Rows with gaps between them can't be split, however small the arena is."""
    state = Layout(
        "state",
        Plane("k", "layer page token 5"),
        Plane("ssm", "layer request 3000000", rows=(OfRequest(),)),
    )
    geometry = state.bind(dtype="uint8", layer=2, token=1)
    device = CPUDevice(lanes=1)
    pool = Pool.create(geometry, device, page_count=1, request_count=1)
    assert 3_000_000 == chunk_bytes_for(pool, 1 << 20)
    device.close()
