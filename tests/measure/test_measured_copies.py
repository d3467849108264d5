from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.layout import GQA
from kvtide.measure.copies import CopyFigures, make_operations
from kvtide.measure.timing import Timing
from kvtide.measure.workload import make_slots
from kvtide.pool import Pool

OPERATIONS = ["gather", "sealed_gather", "scatter", "engine_gather", "engine_scatter"]


def test_copy_ratios_compare_speed_and_the_seal_ratio_time() -> None:
    """Half of memcpy's speed is 0.5; sealing that adds a fifth is 1.2."""
    seconds = {
        "gather": 0.2,
        "sealed_gather": 0.24,
        "scatter": 0.4,
        "engine_gather": 0.5,
        "engine_scatter": 1.0,
    }
    case = {name: Timing(value, 0.0, (value / 2, value * 2)) for name, value in seconds.items()}
    figures = CopyFigures(2_000_000_000, Timing(0.1, 0.2, (0.1, 0.2)), {"pages": case})
    assert {
        "size_bytes": 2_000_000_000,
        "memcpy_gb_s": 20.0,
        "memcpy_gb_s_quartiles": [10.0, 20.0],
        "cases": [
            {
                "name": "pages",
                "gather_ratio": 0.5,
                "gather_ratio_quartiles": [0.25, 1.0],
                "scatter_ratio": 0.25,
                "scatter_ratio_quartiles": [0.125, 0.5],
                "engine_gather_ratio": 0.2,
                "engine_gather_ratio_quartiles": [0.1, 0.4],
                "engine_scatter_ratio": 0.1,
                "engine_scatter_ratio_quartiles": [0.05, 0.2],
                "seal_ratio": 1.2,
                "seal_ratio_quartiles": [0.6, 2.4],
            }
        ],
    } == figures.to_json()


def test_slots_are_in_the_order_of_their_case() -> None:
    """They are contiguous, whole pages in any order, or single slots in any order; none repeats."""
    cases = make_slots(256, 1024)
    for slots in cases.values():
        assert (256, 256) == (slots.size, np.unique(slots).size)
        assert 0 <= slots.min() <= slots.max() < 1024
    assert (np.diff(cases["contiguous"]) == 1).all()
    pages = cases["pages"].reshape(4, 64)
    assert (pages[:, 0] % 64 == 0).all()
    assert (np.diff(pages) == 1).all()
    assert (np.diff(pages[:, 0]) != 64).any()
    assert (np.diff(cases["random"]) != 1).mean() > 0.9


@pytest.mark.parametrize("case", ["contiguous", "pages", "random"])
def test_every_operation_copies_the_right_bytes(case: str) -> None:
    """Both scatters bring the gathered bytes back, and change nothing else."""
    device = open_device("cpu")
    geometry = GQA.bind(dtype="bfloat16", layer=4, token=64, head=8, head_dim=128, v_head_dim=128)
    pool = Pool.create(geometry, device, page_count=8)
    for buffer in pool.buffers:
        buffer.random_()
    expected = [buffer.clone() for buffer in pool.buffers]
    slots = make_slots(128, pool.slot_count)[case]
    lease = HostArena(device, limit_bytes=2 << 20, block_bytes=1 << 20).lease(2)
    operations = make_operations(pool, slots, lease.blocks)
    assert OPERATIONS == list(operations)
    for gather, scatter in (("sealed_gather", "scatter"), ("engine_gather", "engine_scatter")):
        checksums = operations[gather]()
        assert gather != "sealed_gather" or checksums != operations["gather"]()
        for name in ("k", "v"):
            for layer in range(4):
                pool.plane(name, layer)[torch.from_numpy(slots)] = 0
        assert not torch.equal(expected[0], pool.buffers[0])
        operations[scatter]()
        for before, after in zip(expected, pool.buffers, strict=True):
            assert torch.equal(before, after)
    lease.release()
    device.close()
