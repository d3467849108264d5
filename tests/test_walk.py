"""docs/walk.md says where one byte is at each step; the tests look there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from kvtide import GQA, HostArena, PageAllocator, Pool, Tide, open_device

TEXT = (Path(__file__).parent.parent / "docs" / "walk.md").read_text("utf-8")
TOKEN, LAYER = 20, 3
MARK = 0x5A


def test_the_byte_is_where_the_walk_says() -> None:
    """The byte is in the pool, in the snapshot's chunk, and in the pool again."""
    geometry = GQA.bind(dtype="bfloat16", token=16, layer=4, head=2, head_dim=8, v_head_dim=8)
    cpu, pages = open_device("cpu"), PageAllocator(12)
    pool = Pool.create(geometry, cpu, page_count=12)
    tide = Tide(pool, HostArena(cpu, limit_bytes=1 << 20, block_bytes=16 << 10), pages)
    buffer = pool.buffers[0]
    all_pages = pages.acquire(12)
    assert all_pages is not None

    pool.plane("k", LAYER)[int(tide.pool.slots_of([7, 2])[TOKEN])].view(torch.uint8)[0, 0] = MARK
    assert [19_584] == buffer.nonzero().flatten().tolist()

    snapshot = tide.retract([7, 2], 22)
    (chunk,) = snapshot.chunks
    assert [2_752] == [place for place, byte in enumerate(chunk) if byte]
    assert [(0, 0, 5_632)] == [span[:3] for span in snapshot.seal.spans]

    buffer.zero_()
    assert pages.acquire(2) is not None
    pages.release([11, 4])
    assert [11, 4] == tide.resume(snapshot, 2)
    assert [20_608] == buffer.nonzero().flatten().tolist()
    assert MARK == int(buffer[20_608])
    cpu.close()


def test_the_walk_names_the_same_places() -> None:
    """The text has the numbers of the test above."""
    for place in ("19,584", "2,752", "5,632", "20,608"):
        assert place in TEXT


def test_each_step_says_where_the_byte_is() -> None:
    """The text has eight steps in order, each with an answer."""
    steps = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [str(number) for number in range(1, 9)] == [step.partition(".")[0] for step in steps]
    assert [] == [step.splitlines()[0] for step in steps if "**Where is the byte?**" not in step]
