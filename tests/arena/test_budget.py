"""How much host memory an arena may take, on this machine and in a container."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtide.arena import budget
from kvtide.device import CPUDevice
from kvtide.layout import GQA, Layout, OfRequest, Plane
from kvtide.pool import Pool

GEOMETRY = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=5, v_head_dim=5)


def test_host_memory_is_a_quarter_of_what_the_pool_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool counts as taken, though nobody has written to it yet."""
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1000)
    assert 100 == budget.default_host_bytes(600)
    assert 0 == budget.default_host_bytes(1001)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system would kill the process for what lies beyond it."""
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(budget, "_CONTROL_GROUP", tmp_path)
    assert 3000 == budget.free_memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert budget.free_memory_bytes() > 3000


def test_blocks_are_whole_tokens_and_no_more_than_a_16th_of_a_small_arena() -> None:
    """10 bytes a token: 2**16 of them fit into what a CPU moves at once, 2**13 into 128 KiB."""
    device = CPUDevice(lanes=1)
    pool = Pool.create(GEOMETRY, device, page_count=1)
    assert 10 * 2**16 == budget.block_bytes_for(pool, 1 << 30)
    assert 10 * 2**13 == budget.block_bytes_for(pool, 2 << 20)
    device.close()


def in_layers(layers: int, device: CPUDevice) -> Pool:
    """A pool of 10 bytes a token and layer, in two buffers a layer."""
    geometry = GQA.bind(dtype="uint8", layer=layers, token=4, head=1, head_dim=5, v_head_dim=5)
    planes = {name: list(torch.zeros(layers, 8, 1, 5).byte()) for name in ("k", "v")}
    return Pool.adopt(geometry, device, planes)


def test_blocks_are_larger_for_a_pool_in_many_buffers() -> None:
    """Each of them takes a call for every chunk. There is an end to it, and an arena's limit."""
    device = CPUDevice(lanes=1)
    sizes = [budget.block_bytes_for(in_layers(n, device), 1 << 30) for n in (1, 10, 100)]
    assert [10 * 2**16, 100 * 2**15, 1000 * 2**14] == sizes
    assert 100 * 2**13 == budget.block_bytes_for(in_layers(10, device), 16 << 20)
    device.close()


def test_a_block_holds_the_largest_row() -> None:
    """Rows with gaps between them can't be cut, however small the arena is."""
    state = Layout(
        "state",
        Plane("k", "layer page token 5"),
        Plane("ssm", "layer request 3000000", rows=(OfRequest(),)),
    )
    geometry = state.bind(dtype="uint8", layer=2, token=1)
    device = CPUDevice(lanes=1)
    pool = Pool.create(geometry, device, page_count=1, request_count=1)
    assert 3_000_000 == budget.block_bytes_for(pool, 1 << 20)
    device.close()
