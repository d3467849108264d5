"""docs/walk.md says where one byte is at each step; the tests look there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from kvtide import GQA, HostArena, PageAllocator, Pool, SnapshotMiss, Tide, open_device
from kvtide.device import Device
from kvtide.tier import DiskTier, Spill

TEXT = (Path(__file__).parent.parent / "docs" / "walk.md").read_text("utf-8")
TOKEN, LAYER = 20, 3
MARK = 0x5A


@pytest.fixture
def cpu() -> Iterator[Device]:
    """The device of the example."""
    with closing(open_device("cpu")) as device:
        yield device


def make_tide(arena: HostArena, device: Device, spill: Spill | None = None) -> Tide:
    """Makes the pool of the example, of which all pages are held, and puts the byte into it."""
    geometry = GQA.bind(dtype="bfloat16", token=16, layer=4, head=2, head_dim=8, v_head_dim=8)
    pool, pages = Pool.create(geometry, device, page_count=12), PageAllocator(12)
    assert pages.acquire(12) is not None
    slot = int(pool.slots_of([7, 2])[TOKEN])
    pool.plane("k", LAYER)[slot].view(torch.uint8)[0, 0] = MARK
    return Tide(pool, arena, pages, spill)


def free_pages_of_step_7(tide: Tide) -> None:
    """Makes pages 11 and 4 the only free ones. Pages 7 and 2 are free before."""
    assert tide._books.acquire(2) is not None
    tide._books.release([11, 4])


def test_the_byte_is_where_the_walk_says(cpu: Device) -> None:
    """The byte is in the pool, in the snapshot's chunk, and in the pool again."""
    tide = make_tide(HostArena(cpu, limit_bytes=1 << 20, block_bytes=16 << 10), cpu)
    buffer = tide.pool.buffers[0]
    assert [19_584] == buffer.nonzero().flatten().tolist()

    snapshot = tide.retract([7, 2], 22)
    (chunk,) = snapshot.chunks
    assert [2_752] == [place for place, byte in enumerate(chunk) if byte]
    assert [(0, 0, 5_632)] == [span[:3] for span in snapshot.seal.spans]

    buffer.zero_()
    free_pages_of_step_7(tide)
    assert [11, 4] == tide.resume(snapshot, 2)
    assert [20_608] == buffer.nonzero().flatten().tolist()
    assert MARK == int(buffer[20_608])


def test_the_byte_may_wait_in_a_file(cpu: Device, tmp_path: Path) -> None:
    """Another snapshot takes the only block, so the byte is in the tier alone, and comes back."""
    arena = HostArena(cpu, limit_bytes=16 << 10, block_bytes=16 << 10)
    with closing(DiskTier(tmp_path / "kv", limit_bytes=1 << 20)) as tier:
        spill = Spill(arena, [tier])
        tide = make_tide(arena, cpu, spill)
        snapshot = tide.retract([7, 2], 22)
        other = tide.offload(range(16))
        with pytest.raises(SnapshotMiss):
            snapshot.verify()  # it isn't in host memory
        chunk = load_file(*(tmp_path / "kv").rglob("*.safetensors"))["chunk.0"]
        assert [2_752] == chunk.nonzero()[0].tolist()
        assert 5_632 == chunk.size

        tide.discard(other)
        tide.pool.buffers[0].zero_()
        free_pages_of_step_7(tide)
        assert [11, 4] == tide.resume(snapshot, 2)
        assert [20_608] == tide.pool.buffers[0].nonzero().flatten().tolist()
        spill.close()
        assert [] == [*(tmp_path / "kv").rglob("*.safetensors")]


def test_the_walk_names_the_same_places() -> None:
    """The text has the numbers of the test above."""
    for place in ("19,584", "2,752", "5,632", "20,608"):
        assert place in TEXT


def test_each_step_says_where_the_byte_is() -> None:
    """The text has eight steps in order, each with an answer."""
    steps = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [str(number) for number in range(1, 9)] == [step.partition(".")[0] for step in steps]
    assert [] == [step.splitlines()[0] for step in steps if "**Where is the byte?**" not in step]
