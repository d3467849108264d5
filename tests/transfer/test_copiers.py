"""Both copiers give the same bytes as copies that are made one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.device import Block, CPUDevice
from kvtide.transfer import Mover
from kvtide.transfer.bind import memories_of, step_of
from kvtide.transfer.plan import BufferPlan, BufferSet
from kvtide.transfer.run import Copier, DeviceCopier, HostCopier

KINDS = {"by numpy": HostCopier, "by torch": DeviceCopier}


@pytest.fixture(params=KINDS)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test by numpy, as for host memory, and by torch, as for a device."""
    if request.param == "by torch":
        monkeypatch.setattr("kvtide.transfer.mover.suits_numpy", lambda _: False)
    return str(request.param)


def in_steps(step: int, count: int, offset: int, tail: int) -> list[Block]:
    """Makes blocks of one slab, `step` bytes apart; the slab's size would allow wider elements."""
    slab = torch.zeros(offset + count * step + tail, dtype=torch.uint8)
    return [Block(slab, offset + number * step) for number in range(count)]


def copier_of(
    how: str,
    buffers: list[torch.Tensor],
    units: list[list[int]],
    blocks: list[Block],
    block_offset: int,
) -> Copier:
    """Makes a copier like the mover's, for units of 16 bytes of `buffers`."""
    device = CPUDevice(lanes=1)
    buffer_set = BufferSet(tuple(range(len(buffers))), 16, np.zeros(1, np.int64), is_padded=False)
    plan = BufferPlan(buffer_set, 0, 16, np.array(units, np.int64), block_offset, len(units[0]))
    pool: Any = SimpleNamespace(
        buffers=buffers, device=device
    )  # the mover reads nothing else of it
    copier = Mover(pool)._copier_of(plan, blocks, memories_of(blocks), step_of(blocks))
    assert KINDS[how] is type(copier)
    device.close()
    return copier


CALLS: tuple[tuple[range, slice | None], ...] = (
    (range(2, 3), slice(2, 3)),
    (range(2), None),
    (range(2, 3), slice(2)),
)
"""Two calls copy the first of three buffers of three units; one call copies the other two."""


def three_buffers() -> list[torch.Tensor]:
    """Makes three buffers of 20 units."""
    return [torch.randint(1, 256, (20 * 16,), dtype=torch.uint8) for _ in range(3)]


@pytest.mark.parametrize("step", [160, 168, 169])
@pytest.mark.parametrize(("offset", "block_offset"), [(0, 0), (16, 8), (5, 3)])
def test_each_chunk_has_its_own_units(how: str, step: int, offset: int, block_offset: int) -> None:
    """Units go to their place in their block and back, whatever divides the blocks' distance."""
    buffers = three_buffers()
    rows = [buffer.view(-1, 16).clone() for buffer in buffers]
    index = [[3, 19, 0], [7, 8, 5], [11, 2, 12]]
    blocks = in_steps(step, len(index), offset, -(offset + len(index) * step) % 16)
    slab = blocks[0].slab
    copier = copier_of(how, buffers, index, blocks, block_offset)
    expected = torch.zeros_like(slab)
    for number, units in enumerate(index):
        first = offset + number * step + block_offset
        expected[first : first + 144] = torch.cat([buffer[units].view(-1) for buffer in rows])
        for call in CALLS:
            copier.gather(number, *call, None)
    assert torch.equal(expected, slab)
    wanted = [torch.zeros_like(buffer) for buffer in rows]
    for buffer in buffers:
        buffer.zero_()
    for number, units in enumerate(index):
        for given, buffer in zip(wanted, rows, strict=True):
            given[units] = buffer[units]
        for call in CALLS:
            copier.scatter(number, *call, None)
    assert all(map(torch.equal, [given.view(-1) for given in wanted], buffers))


@pytest.mark.parametrize("distances", [(640, 640), (640, 656)], ids=["even", "uneven"])
def test_a_unit_of_each_buffer_moves_by_one_call(how: str, distances: tuple[int, int]) -> None:
    """An engine's layers most often lie evenly in one allocation, with other bytes between them."""
    whole = torch.randint(1, 256, (2000,), dtype=torch.uint8)
    before, places = whole.clone(), [16, 16 + distances[0], 16 + sum(distances)]
    buffers = [whole[place : place + 320] for place in places]
    blocks = in_steps(64, 2, 0, 0)
    copier = copier_of(how, buffers, [[7], [19]], blocks, 8)
    is_one_view = isinstance(copier._buffers, np.ndarray)
    assert is_one_view == (how == "by numpy" and distances[0] == distances[1])
    for number, unit in enumerate((7, 19)):
        for call in (range(2), range(2, 3)):
            copier.gather(number, call, None, None)
        firsts = [place + 16 * unit for place in places]
        gathered = torch.cat([before[first : first + 16] for first in firsts])
        place = slice(64 * number + 8, 64 * number + 56)
        assert torch.equal(gathered, blocks[0].slab[place])
        for first in firsts:
            whole[first : first + 16] = 0
        copier.scatter(number, range(1), None, None)
        copier.scatter(number, range(1, 3), None, None)
    assert torch.equal(before, whole)


def test_staging_is_laid_out_like_a_block(how: str) -> None:
    """The block isn't changed."""
    buffers = three_buffers()
    rows = [buffer.view(-1, 16).clone() for buffer in buffers]
    blocks, staging = in_steps(160, 2, 0, 0), torch.zeros(160).byte()
    copier = copier_of(how, buffers, [[3, 19, 1], [7, 8, 2]], blocks, 8)
    for call in CALLS:
        copier.gather(1, *call, staging)
    gathered = torch.cat([buffer[[7, 8, 2]].view(-1) for buffer in rows])
    assert torch.equal(gathered, staging[8:152])
    assert not staging[:8].any()
    assert not staging[152:].any()
    assert not blocks[0].slab.any()
    for buffer in buffers:
        buffer.zero_()
    for call in CALLS:
        copier.scatter(0, *call, staging)
    for buffer, given in zip(buffers, rows, strict=True):
        assert torch.equal(given[[7, 8, 2]], buffer.view(-1, 16)[[3, 19, 1]])


@pytest.mark.parametrize(
    ("buffer", "kind"),
    [
        (torch.zeros(8 * 48, dtype=torch.uint8), HostCopier),
        (torch.zeros(8, 48, dtype=torch.uint8)[:, :16], DeviceCopier),
        (torch.empty(64, dtype=torch.uint8, device="meta"), DeviceCopier),
    ],
    ids=["rows without gaps", "rows with gaps", "a device's memory"],
)
def test_numpy_moves_only_rows_of_host_memory_without_gaps(
    buffer: torch.Tensor, kind: type
) -> None:
    """numpy would copy a whole buffer with gaps to take some of its rows."""
    name = next(name for name in KINDS if KINDS[name] is kind)
    copier_of(name, [buffer], [[0, 1]], in_steps(160, 1, 0, 0), 0)


@pytest.mark.parametrize(
    ("buffer", "width"),
    [
        (torch.zeros(20 * 16, dtype=torch.uint8), 16),
        (torch.zeros(20 * 16 + 8, dtype=torch.uint8)[8:], 8),
        (torch.zeros(20 * 16 + 1, dtype=torch.uint8)[1:], 1),
        (torch.zeros(20, 48, dtype=torch.uint8)[:, :16], 16),
        (torch.zeros(20, 40, dtype=torch.uint8)[:, 8:24], 8),
        (torch.zeros(20, 17, dtype=torch.uint8)[:, :16], 1),
    ],
    ids=["without gaps", "half an element in", "at an odd byte", "gaps", "gaps of 24", "gaps of 1"],
)
def test_torch_moves_the_widest_elements_that_fit(
    monkeypatch: pytest.MonkeyPatch, buffer: torch.Tensor, width: int
) -> None:
    """A device would need several times as long for single bytes."""
    monkeypatch.setattr("kvtide.transfer.mover.suits_numpy", lambda _: False)
    copier = copier_of("by torch", [buffer], [[0, 1]], in_steps(160, 1, 0, 0), 0)
    assert isinstance(copier, DeviceCopier)
    assert width == copier._buffers[0].element_size()


def test_torch_moves_elements_that_fit_a_slab_inside_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slab begins four bytes after a multiple of eight, and so do its blocks."""
    monkeypatch.setattr("kvtide.transfer.mover.suits_numpy", lambda _: False)
    blocks = [Block(torch.zeros(164, dtype=torch.uint8)[4:], 0)]
    copier = copier_of("by torch", [torch.arange(64, dtype=torch.uint8)], [[2, 0]], blocks, 0)
    copier.gather(0, range(1), None, None)
    assert [*range(32, 48), *range(16)] == blocks[0].slab[:32].tolist()


def test_views_of_buffers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests' slots make other units each time, so the number of kept views has a limit."""
    monkeypatch.setattr("kvtide.transfer.mover._MOST_VIEWS", 6)
    buffers, device = three_buffers(), CPUDevice(lanes=1)
    pool: Any = SimpleNamespace(buffers=buffers, device=device)
    mover = Mover(pool)
    buffer_set = BufferSet((0, 1, 2), 16, np.zeros(1, np.int64), is_padded=False)
    for skip_bytes in range(0, 160, 16):
        plan = BufferPlan(buffer_set, skip_bytes, 16, np.array([[0, 1]]), 0, 2)
        assert 3 == len(mover._views_of(plan, "uint8"))
        assert sum(map(len, mover._views.values())) <= 6
    device.close()
