"""Both ways of moving units, against the same moves one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.device import Block
from kvtide.transfer.copies import Copies, DeviceCopies, HostCopies, Move, Run, Units, runs_of

ELEMENTS = (torch.complex128, torch.int64, torch.uint8)


def in_steps(step: int, count: int, offset: int, tail: int) -> Run:
    """Blocks of one slab, so far apart: the slab's size alone would allow wider elements."""
    slab = torch.zeros(offset + count * step + tail, dtype=torch.uint8)
    (run,) = runs_of([Block(slab, offset + number * step) for number in range(count)])
    return run


def copies_of(
    way: str, buffers: list[torch.Tensor], index: list[list[int]], run: Run, at: int
) -> Copies:
    """As the mover makes them, for units of 16 bytes of `buffers`."""
    source, units = Units(buffers, 0, 16), np.array(index, np.int64)
    if way == "by numpy":
        assert source.in_memory
        return HostCopies(source, units, run, at, len(index[0]))
    return DeviceCopies(source, torch.from_numpy(units), run, at, ELEMENTS)


def moves_of(copies: Copies) -> list[Move]:
    """Of three buffers with three units each: two moves of one, and one of the other two."""
    pairs = [(range(2, 3), slice(2, 3)), (range(2), None), (range(2, 3), slice(2))]
    return [Move(copies, buffers, span, 0) for buffers, span in pairs]


def three_buffers() -> list[torch.Tensor]:
    """Of 20 units."""
    return [torch.randint(1, 256, (20 * 16,), dtype=torch.uint8) for _ in range(3)]


@pytest.mark.parametrize("way", ["by numpy", "by torch"])
@pytest.mark.parametrize("step", [160, 168, 169])
@pytest.mark.parametrize(("offset", "at"), [(0, 0), (16, 8), (5, 3)])
def test_each_chunk_has_its_own_units(way: str, step: int, offset: int, at: int) -> None:
    """At their place in its own block, whatever divides the blocks' distance; and back."""
    buffers = three_buffers()
    rows = [buffer.view(-1, 16).clone() for buffer in buffers]
    index = [[3, 19, 0], [7, 8, 5], [11, 2, 12]]
    run = in_steps(step, len(index), offset, -(offset + len(index) * step) % 16)
    copies = copies_of(way, buffers, index, run, at)
    expected = torch.zeros_like(run.slab)
    for number, units in enumerate(index):
        first = offset + number * step + at
        expected[first : first + 144] = torch.cat([one[units].view(-1) for one in rows])
        for move in moves_of(copies):
            move.gather(number, None)
    assert torch.equal(expected, run.slab)
    wanted = [torch.zeros_like(one) for one in rows]
    for one in buffers:
        one.zero_()
    for number, units in enumerate(index):
        for given, one in zip(wanted, rows, strict=True):
            given[units] = one[units]
        for move in moves_of(copies):
            move.scatter(number, None)
    assert all(map(torch.equal, [one.view(-1) for one in wanted], buffers))


@pytest.mark.parametrize("way", ["by numpy", "by torch"])
def test_staging_is_laid_out_like_a_block(way: str) -> None:
    """The block isn't touched."""
    buffers = three_buffers()
    rows = [buffer.view(-1, 16).clone() for buffer in buffers]
    run, staging = in_steps(160, 2, 0, 0), torch.zeros(160).byte()
    copies = copies_of(way, buffers, [[3, 19, 1], [7, 8, 2]], run, 8)
    for move in moves_of(copies):
        move.gather(1, staging)
    assert torch.equal(torch.cat([one[[7, 8, 2]].view(-1) for one in rows]), staging[8:152])
    assert not staging[:8].any()
    assert not staging[152:].any()
    assert not run.slab.any()
    for one in buffers:
        one.zero_()
    for move in moves_of(copies):
        move.scatter(0, staging)
    for one, given in zip(buffers, rows, strict=True):
        assert torch.equal(given[[7, 8, 2]], one.view(-1, 16)[[3, 19, 1]])


def test_rows_with_gaps_are_left_to_torch() -> None:
    """numpy would copy all of the buffer to take some of its rows."""
    wide = torch.zeros(8, 48, dtype=torch.uint8)
    assert not Units([wide[:, :16]], 0, 16).in_memory
    assert Units([wide.view(-1)], 16, 16).in_memory


def test_memory_of_a_device_is_left_to_torch() -> None:
    """It isn't the host's to read."""
    assert not Units([torch.empty(64, dtype=torch.uint8, device="meta")], 0, 16).in_memory
