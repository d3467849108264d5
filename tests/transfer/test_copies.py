"""Both ways of moving units, against the same moves one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.device import Block
from kvtide.transfer.copies import Copies, DeviceCopies, HostCopies, Run, Units, runs_of, widest

ELEMENTS = (torch.complex128, torch.int64, torch.uint8)


def in_steps(step: int, count: int, offset: int, tail: int) -> Run:
    """Blocks of one slab, so far apart: the slab's size alone would allow wider elements."""
    slab = torch.zeros(offset + count * step + tail, dtype=torch.uint8)
    (run,) = runs_of([Block(slab, offset + number * step) for number in range(count)])
    return run


def copies_of(way: str, buffer: torch.Tensor, index: list[list[int]], run: Run, at: int) -> Copies:
    """As the mover makes them, for units of 16 bytes of `buffer`."""
    source, units = Units(buffer, 0, 16), np.array(index, np.int64)
    if way == "by numpy":
        assert source.in_memory is not None
        return HostCopies(source.in_memory, units, run, at)
    dtype = widest(ELEMENTS, source.bits | run.bits | at)
    parts = run.parts(at, dtype, (units.shape[1], 16 // dtype.itemsize))
    return DeviceCopies(source.as_type(dtype), torch.from_numpy(units).unbind(), parts, at)


@pytest.mark.parametrize("way", ["by numpy", "by torch"])
@pytest.mark.parametrize("step", [64, 72, 73])
@pytest.mark.parametrize(("offset", "at"), [(0, 0), (16, 8), (5, 3)])
def test_each_chunk_has_its_own_units(way: str, step: int, offset: int, at: int) -> None:
    """At their place in its own block, whatever divides the blocks' distance; and back."""
    buffer = torch.randint(1, 256, (20 * 16,), dtype=torch.uint8)
    rows = buffer.view(-1, 16).clone()
    index = [[3, 19, 0], [7, 8, 5], [11, 2, 12]]
    run = in_steps(step, len(index), offset, -(offset + len(index) * step) % 16)
    copies = copies_of(way, buffer, index, run, at)
    assert at + 3 * 16 == copies.stop
    expected = torch.zeros_like(run.slab)
    for number, units in enumerate(index):
        first = offset + number * step + at
        expected[first : first + 48] = rows[units].view(-1)
        copies.gather(number, None)
    assert torch.equal(expected, run.slab)
    buffer.zero_()
    wanted = torch.zeros_like(rows)
    for number, units in enumerate(index):
        wanted[units] = rows[units]
        copies.scatter(number, None)
    assert torch.equal(wanted.view(-1), buffer)


@pytest.mark.parametrize("way", ["by numpy", "by torch"])
def test_staging_is_laid_out_like_a_block(way: str) -> None:
    """The block isn't touched."""
    buffer = torch.randint(1, 256, (20 * 16,), dtype=torch.uint8)
    rows, run, staging = buffer.view(-1, 16).clone(), in_steps(64, 2, 0, 0), torch.zeros(64).byte()
    copies = copies_of(way, buffer, [[3, 19], [7, 8]], run, 8)
    copies.gather(1, staging)
    assert torch.equal(rows[[7, 8]].view(-1), staging[8:40])
    assert not staging[:8].any()
    assert not staging[40:].any()
    assert not run.slab.any()
    buffer.zero_()
    copies.scatter(0, staging)
    assert torch.equal(rows[[7, 8]], buffer.view(-1, 16)[[3, 19]])


def test_rows_with_gaps_are_left_to_torch() -> None:
    """numpy would copy all of the buffer to take some of its rows."""
    wide = torch.zeros(8, 48, dtype=torch.uint8)
    assert Units(wide[:, :16], 0, 16).in_memory is None
    assert Units(wide.view(-1), 16, 16).in_memory is not None


def test_memory_of_a_device_is_left_to_torch() -> None:
    """It isn't the host's to read."""
    assert Units(torch.empty(64, dtype=torch.uint8, device="meta"), 0, 16).in_memory is None
