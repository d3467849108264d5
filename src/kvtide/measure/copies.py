"""Measures how fast KV is gathered and scattered, compared with a plain copy of as many bytes.

The plain copy, `memcpy`, is torch's `Tensor.copy_` from one contiguous buffer to another, with the
same number of threads. A ratio of 0.9 means nine tenths of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.arena import HostArena
from kvtide.device import Block, Device, open_device
from kvtide.layout import GQA
from kvtide.measure.timing import Operation, Timing, time_in_turns
from kvtide.measure.workload import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    PAGE_SIZE,
    POOL_SHARE,
    TOKEN_BYTES,
    make_slots,
)
from kvtide.pool import Pool
from kvtide.transfer import Mover

_ENGINE_CHUNK = 8192
"""How many slots SGLang's pools index at once: cpu_offloading_chunk_size."""


@final
@dataclass(frozen=True, slots=True)
class CopyFigures:
    """The measured times; each operation moved `size_bytes`.

    `cases` maps an order of slots to the times of the operations on such slots: gather,
    sealed_gather, scatter, engine_gather, engine_scatter.
    """

    size_bytes: int
    memcpy: Timing
    cases: Mapping[str, Mapping[str, Timing]]

    def to_json(self) -> dict[str, object]:
        """Ratios of bandwidth to memcpy's, each with its quartiles; `seal_ratio` is one of times.

        `seal_ratio` is the time of a sealed gather divided by that of a gather without a seal.
        """
        entries = [
            {"name": name, **ratios_to_json(self.memcpy, case)} for name, case in self.cases.items()
        ]
        return {
            "size_bytes": self.size_bytes,
            **memcpy_to_json(self.memcpy, self.size_bytes),
            "cases": entries,
        }


def memcpy_to_json(memcpy: Timing, size_bytes: int) -> dict[str, Any]:
    """The bandwidth of a plain copy, in 1e9 bytes a second."""
    return memcpy.speed(size_bytes / 1e9).to_json("memcpy_gb_s")


def ratios_to_json(memcpy: Timing, moves: Mapping[str, Timing]) -> dict[str, Any]:
    """The moves' bandwidths relative to memcpy's, then the time that a seal takes."""
    ratios: dict[str, Any] = {}
    for name, timing in moves.items():
        if name != "sealed_gather":
            ratios |= timing.speed(memcpy.seconds).to_json(f"{name}_ratio")
    seal = moves["sealed_gather"].relative_to(moves["gather"].seconds)
    return {**ratios, **seal.to_json("seal_ratio")}


def measure_copy(size_bytes: int, rounds: int) -> CopyFigures:
    """Times all operations in turns on the CPU, with torch's number of threads.

    `size_bytes` is a multiple of 1 MiB, the size of a page. Takes about ten times as much memory.
    """
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device("cpu")))
        pool = make_pool(device, size_bytes)
        arena = HostArena(device, limit_bytes=size_bytes, block_bytes=PAGE_BYTES)
        lease = arena.lease(size_bytes // PAGE_BYTES)
        stack.callback(lease.release)
        plans = {
            name: make_operations(pool, slots, lease.blocks)
            for name, slots in make_slots(size_bytes // TOKEN_BYTES, pool.slot_count).items()
        }
        timings = time_in_turns(
            {("", "memcpy"): lambda: target.copy_(source)}
            | {(case, name): call for case in plans for name, call in plans[case].items()},
            rounds,
        )
    cases = {case: {name: timings[case, name] for name in plans[case]} for case in plans}
    return CopyFigures(size_bytes, timings["", "memcpy"], cases)


def make_pool(device: Device, moved_bytes: int) -> Pool:
    """A pool on `device`, four times as large as `moved_bytes`, which is whole pages of 1 MiB.

    It is filled with random bytes: untouched memory would be a single page of zeros.
    """
    geometry = GQA.bind(
        dtype="bfloat16",
        layer=LAYERS,
        token=PAGE_SIZE,
        head=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
    )
    assert geometry.token_bytes == TOKEN_BYTES, "TOKEN_BYTES must fit the other sizes"
    pool = Pool.create(geometry, device, page_count=POOL_SHARE * moved_bytes // PAGE_BYTES)
    for buffer in pool.buffers:
        # The host makes the random integers: not every accelerator can.
        buffer.copy_(
            torch.empty(buffer.numel() // 8, dtype=torch.int64).random_().view(torch.uint8)
        )
    return pool


def make_operations(
    pool: Pool, slots: NDArray[np.int64], blocks: Sequence[Block]
) -> dict[str, Operation]:
    """The operations of a case, by name; each moves all `slots` in all layers.

    Each of the `blocks` holds a page; together they hold all slots. The engine's gather is
    `tensor[index].to("cpu")` for each plane, layer and chunk, into fresh memory each time. Its
    scatter is `tensor[index] = chunk`. On a CPU `.to("cpu")` doesn't copy, so the engine's gather
    is a single copy.
    """
    index = [
        torch.from_numpy(slots[first : first + _ENGINE_CHUNK])
        for first in range(0, slots.size, _ENGINE_CHUNK)
    ]
    layers = [pool.plane(name, layer) for layer in range(LAYERS) for name in ("k", "v")]

    def engine_gather() -> list[list[torch.Tensor]]:
        return [[tensor[part].to("cpu") for part in index] for tensor in layers]

    saved = engine_gather()

    def engine_scatter() -> None:
        for tensor, chunks in zip(layers, saved, strict=True):
            for part, chunk in zip(index, chunks, strict=True):
                tensor[part] = chunk

    moves = make_moves(pool, [slots], blocks, chunk_bytes=PAGE_BYTES)
    return {**moves, "engine_gather": engine_gather, "engine_scatter": engine_scatter}


def make_moves(
    pool: Pool, rows: Sequence[NDArray[np.int64]], blocks: Sequence[Block], *, chunk_bytes: int
) -> dict[str, Operation]:
    """kvtide's operations of a case: gather, sealed_gather and scatter.

    `rows` has the rows of each group of planes, int64 [row]. Each block holds a chunk.
    """
    mover = Mover(pool)

    def gather(*, seal: bool) -> object:
        return mover.gather(rows, blocks, chunk_bytes=chunk_bytes, seal=seal, at_once=True).wait()

    return {
        "gather": lambda: gather(seal=False),
        "sealed_gather": lambda: gather(seal=True),
        "scatter": lambda: mover.scatter(
            blocks, rows, chunk_bytes=chunk_bytes, spans=(), at_once=True
        ).wait(),
    }
