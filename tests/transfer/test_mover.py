from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import ceil

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtide.device import AcceleratorDevice, Block, CPUDevice
from kvtide.errors import SlotsLost, SnapshotDamaged
from kvtide.form import chunk_sizes, sections_of
from kvtide.layout import GQA, Geometry, Ids
from kvtide.layout.gqa import K_ONLY
from kvtide.layout.recurrent import RECURRENT_AND_FULL
from kvtide.pool import Pool
from kvtide.seal import Span
from kvtide.transfer import Mover
from kvtide.transfer.mover import _WritingJob
from support.lazy_device import LazyDevice
from support.pools import (
    POOL_KINDS,
    PoolCase,
    chunk_bytes,
    fill,
    geometries,
    image_of,
    make_pool,
    same_image,
    scramble,
    slot_lists,
    small_geometry,
    with_rows,
)
from support.simulated import simulated

GUARD = 0x5A
TOKEN_BYTES = 36  # of small_geometry()


@pytest.fixture(scope="module", autouse=True, params=["by numpy", "by torch", "in parts"])
def how(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test by numpy, as for host memory, and by torch, as for a device.

    A third time moves are planned in parts of as few chunks as possible.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in parts":
            patch.setattr("kvtide.transfer.plan._PLANNED_ROWS", 5)
        if request.param == "by torch":
            patch.setattr("kvtide.transfer.mover.suits_numpy", lambda _: False)
        yield


def make_blocks(count: int, size_bytes: int, offset: int, slab_count: int = 1) -> list[Block]:
    """Makes blocks from slabs in turn, the first at `offset`, with a byte between and after."""
    step = size_bytes + 1
    rounds = ceil(count / slab_count)
    slabs = [
        torch.full((offset + rounds * step,), GUARD, dtype=torch.uint8) for _ in range(slab_count)
    ]
    return [Block(slabs[i % slab_count], offset + i // slab_count * step) for i in range(count)]


def sealed(
    mover: Mover, rows: Sequence[Ids], blocks: Sequence[Block], chunk_bytes: int
) -> list[Span]:
    """Gathers these rows, and returns the spans of all chunks."""
    return [*chain(*mover.gather(rows, blocks, chunk_bytes=chunk_bytes).wait())]


def spans_of(chunks: Sequence[bytes]) -> list[Span]:
    """Returns the spans of chunks that are a single span each."""
    return [
        Span(number, 0, len(chunk), xxhash.xxh3_64_intdigest(chunk))
        for number, chunk in enumerate(chunks)
    ]


def spans_at(whole: bytes, stops: Sequence[int]) -> list[Span]:
    """Returns the spans of one chunk that end at these bytes."""
    return [
        Span(0, first, stop, xxhash.xxh3_64_intdigest(whole[first:stop]))
        for first, stop in pairwise((0, *stops))
    ]


def filled(
    kind: str = "created", page_count: int = 5, device: LazyDevice | None = None
) -> PoolCase:
    """Makes a pool of `small_geometry()` with random bytes."""
    case = make_pool(kind, small_geometry(), device or LazyDevice(), page_count)
    fill(case, 3)
    return case


@given(geometries(), st.data())
def test_chunks_hold_the_bytes_of_the_slots(
    device: CPUDevice, geometry: Geometry, data: st.DataObject
) -> None:
    """The order is the format's, for any pool and any alignment of blocks, in several slabs."""
    case = make_pool(data.draw(st.sampled_from(POOL_KINDS)), geometry, device, 4)
    fill(case, data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(0, case.pool.slot_count))
    slots = data.draw(slot_lists(case.pool.slot_count, geometry.page_size, count))
    chunk_tokens = data.draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    size_bytes = chunk_tokens * geometry.token_bytes
    blocks = make_blocks(
        ceil(count / chunk_tokens),
        size_bytes,
        data.draw(st.sampled_from((0, 1, 8, 16))),
        data.draw(st.integers(1, 2)),
    )
    ids = case.pool.checked(slots)
    spans = sealed(Mover(case.pool), [ids], blocks, size_bytes)
    image = image_of(case.pool)
    expected = [
        chunk_bytes(image, slots[i : i + chunk_tokens]) for i in range(0, count, chunk_tokens)
    ]
    found = [
        bytes(block.bytes_view(len(chunk))) for block, chunk in zip(blocks, expected, strict=True)
    ]
    assert expected == found
    assert spans_of(expected) == spans
    guards = {int(b.slab[b.offset + len(c)]) for b, c in zip(blocks, expected, strict=True)}
    assert guards <= {GUARD}, "nothing is written behind a chunk"


@pytest.mark.parametrize("kind", POOL_KINDS)
@pytest.mark.parametrize("offset", [0, 1, 8, 16])
def test_scattering_gives_the_bytes_back(kind: str, offset: int) -> None:
    """The bytes come back to other slots, and no other byte changes."""
    case = filled(kind)
    before = image_of(case.pool)
    blocks = make_blocks(2, 4 * 36, offset)
    mover = Mover(case.pool)
    spans = sealed(mover, [np.arange(7)], blocks, 4 * TOKEN_BYTES)
    target = np.array([13, 19, 4, 5, 6, 7, 8])
    mover.scatter(blocks, [target], chunk_bytes=4 * TOKEN_BYTES, spans=spans).wait()
    assert same_image(with_rows(before, target, before, range(7)), image_of(case.pool))


def test_copies_longer_than_one_call_are_split() -> None:
    """A chunk longer than a copy call arrives complete, in both directions."""
    geometry = GQA.bind(dtype="float32", layer=1, token=16, head=8, head_dim=64, v_head_dim=48)
    case = make_pool("created", geometry, LazyDevice(), 48)
    fill(case, 8)
    before = image_of(case.pool)
    slots, mover = np.arange(380), Mover(case.pool)
    size_bytes = 512 * geometry.token_bytes
    blocks = make_blocks(1, size_bytes, 0)
    spans = sealed(mover, [slots], blocks, size_bytes)
    assert chunk_bytes(before, slots) == bytes(blocks[0].bytes_view(380 * geometry.token_bytes))
    mover.scatter(blocks, [slots + 387], chunk_bytes=size_bytes, spans=spans).wait()
    assert same_image(with_rows(before, slots + 387, before, slots), image_of(case.pool))


@pytest.mark.parametrize("count", [1, 100, 249, 250, 700])
@pytest.mark.parametrize("head_dim", [5, 300])
def test_units_of_any_number_and_width_move(head_dim: int, count: int) -> None:
    """Units are few or many, of a few bytes or of kilobytes, and move one by one in any order."""
    geometry = GQA.bind(dtype="int64", layer=2, token=1, head=1, head_dim=head_dim, v_head_dim=1)
    case = make_pool("created", geometry, LazyDevice(), 1400)
    fill(case, 9)
    before, mover, size_bytes = image_of(case.pool), Mover(case.pool), 704 * geometry.token_bytes
    slots, blocks = np.random.default_rng(4).permutation(1400), make_blocks(1, size_bytes, 8)
    source, target = slots[:count], slots[-count:]
    spans = sealed(mover, [source], blocks, size_bytes)
    found = [bytes(block.bytes_view(count * geometry.token_bytes)) for block in blocks]
    assert [chunk_bytes(before, source)] == found
    mover.scatter(blocks, [target], chunk_bytes=size_bytes, spans=spans).wait()
    assert same_image(with_rows(before, target, before, source), image_of(case.pool))


@pytest.mark.parametrize("count", [100, 255, 256, 257, 1000])
@pytest.mark.parametrize("task_bytes", [1 << 10, 1 << 20, 8 << 20])
def test_checksums_cover_the_whole_chunk(count: int, task_bytes: int) -> None:
    """Spans have whole layers and at least half a MiB, however much a lane takes at once."""
    geometry = GQA.bind(dtype="uint8", layer=3, token=8, head=1, head_dim=512, v_head_dim=64)
    device = CPUDevice(lanes=2)
    device.chunk_bytes = task_bytes
    case = make_pool("created", geometry, device, 128)
    fill(case, 6)
    mover, blocks = Mover(case.pool), make_blocks(1, 1024 * geometry.token_bytes, 0)
    spans = sealed(mover, [np.arange(count)], blocks, 1024 * geometry.token_bytes)
    whole = chunk_bytes(image_of(case.pool), range(count))
    # Values are an eighth as wide as keys. With fewer tokens all layers together are one span.
    stops = [1_024_000, 1_600_000, len(whole)] if count == 1000 else [len(whole)]
    assert spans_at(whole, stops) == spans
    device.close()


@pytest.mark.parametrize(
    ("row_count", "span_count"), [(512, 18), (256, 9), (128, 5), (64, 3), (63, 2)]
)
@pytest.mark.parametrize("kind", POOL_KINDS)
@pytest.mark.parametrize("task_bytes", [1 << 20, 3 << 20])
def test_spans_do_not_depend_on_the_pools_storage(
    kind: str, row_count: int, span_count: int, task_bytes: int
) -> None:
    """They don't depend on the device either: a seal belongs to the bytes."""
    geometry = GQA.bind(dtype="uint8", layer=9, token=8, head=1, head_dim=1024, v_head_dim=1024)
    device = CPUDevice(lanes=2)
    device.chunk_bytes = task_bytes
    case = make_pool(kind, geometry, device, 128)
    fill(case, 6)
    mover, size_bytes = Mover(case.pool), 1024 * geometry.token_bytes
    (section,) = sections_of(geometry, size_bytes)
    stops = section.span_stops(row_count)
    assert span_count == len(stops)
    slots = np.random.default_rng(2).permutation(1024)
    for rows in (np.arange(1024), slots, np.arange(1024)[::-1]):
        blocks = make_blocks(1, size_bytes, 0)
        spans = sealed(mover, [rows[:row_count]], blocks, size_bytes)
        assert spans_at(bytes(blocks[0].bytes_view(stops[-1])), stops) == spans
    device.close()


def test_a_large_row_is_shared_by_the_lanes(device: CPUDevice) -> None:
    """A request's recurrent state is such a row: each of its layers is a span."""
    geometry = GQA.bind(dtype="uint8", layer=5, token=1, head=1, head_dim=1 << 20, v_head_dim=64)
    case = make_pool("created", geometry, device, 4)
    fill(case, 6)
    mover, size_bytes = Mover(case.pool), geometry.token_bytes
    blocks = make_blocks(1, size_bytes, 0)
    spans = sealed(mover, [np.array([3])], blocks, size_bytes)
    whole = chunk_bytes(image_of(case.pool), [3])
    assert spans_at(whole, [*(end << 20 for end in range(1, 6)), len(whole)]) == spans


@pytest.mark.parametrize("kind", POOL_KINDS)
@pytest.mark.parametrize(
    ("widths", "span_sizes"),
    [
        ((50, 50), [550, 550, 100]),
        ((110, 110), [550, 550, 550, 550, 440]),
        ((70, 1024), [560, 1304] + [1024] * 11),
    ],
)
def test_layers_of_a_large_row_make_the_same_spans(
    device: CPUDevice, kind: str, widths: tuple[int, int], span_sizes: list[int]
) -> None:
    """One tensor may have all layers, or each layer its own. Sizes are in KiB, for 12 layers."""
    k, v = (width << 10 for width in widths)
    geometry = GQA.bind(dtype="uint8", layer=12, token=1, head=1, head_dim=k, v_head_dim=v)
    case = make_pool(kind, geometry, device, 2)
    fill(case, 6)
    mover, blocks = Mover(case.pool), make_blocks(1, geometry.token_bytes, 0)
    spans = sealed(mover, [np.array([1])], blocks, geometry.token_bytes)
    whole = chunk_bytes(image_of(case.pool), [1])
    stops = [stop << 10 for stop in accumulate(span_sizes)]
    assert (len(whole), spans_at(whole, stops)) == (stops[-1], spans)


@pytest.mark.parametrize("source", [1, 3, 4, 8])
@pytest.mark.parametrize("target", [1, 3, 4, 8])
def test_devices_with_other_task_sizes_read_each_others_snapshots(source: int, target: int) -> None:
    """Sizes are in MiB, for six layers of a MiB: one device seals, and the other restores."""
    geometry = K_ONLY.bind(dtype="uint8", layer=6, token=1, head=1, head_dim=1024)
    moved = np.random.default_rng(5).permutation(1200)[:1024]
    blocks, size_bytes = make_blocks(1, 6 << 20, 0), 6 << 20
    movers, cases = [], []
    for task_mib in (source, target):
        device = CPUDevice(lanes=2)
        device.chunk_bytes = task_mib << 20
        cases.append(make_pool("created", geometry, device, 1200))
        fill(cases[-1], task_mib)
        movers.append(Mover(cases[-1].pool))
    spans = sealed(movers[0], [moved], blocks, size_bytes)
    before = image_of(cases[1].pool)
    assert 6 == len(spans)
    for flipped in (0, (3 << 20) - 1, (6 << 20) - 1):
        blocks[0].bytes_view(size_bytes)[flipped] ^= 1
        with pytest.raises(SnapshotDamaged):
            movers[1].scatter(blocks, [moved], chunk_bytes=size_bytes, spans=spans).wait()
        blocks[0].bytes_view(size_bytes)[flipped] ^= 1
        assert same_image(before, image_of(cases[1].pool))
    movers[1].scatter(blocks, [moved], chunk_bytes=size_bytes, spans=spans).wait()
    expected = with_rows(before, moved, image_of(cases[0].pool), moved)
    assert same_image(expected, image_of(cases[1].pool))
    for case in cases:
        case.pool.device.close()


def test_staging_holds_the_largest_chunk_of_all_sections() -> None:
    """State has chunks of another size than tokens."""
    geometry = RECURRENT_AND_FULL.bind(
        dtype="uint8", token=4,
        full_layer=1, full_head=1, full_head_dim=1, full_v_head_dim=1,
        state_layer=1, state_channel=8, state_width=8,
        state_head=1, state_head_dim=1, state_state=1,
    )  # fmt: skip
    with simulated("lazy") as name:
        device = AcceleratorDevice(name)
        pool = Pool.create(geometry, device, page_count=2, request_count=2)
        scramble(pool, 2)
        names = [plane.name for plane in geometry.planes]
        before = {name: pool.plane(name, 0).cpu().clone() for name in names}
        mover, slots = Mover(pool), np.arange(8)
        rows, others = (
            [group.ids for group in pool.rows_of(slots, request=number)] for number in (0, 1)
        )
        sizes = [*chunk_sizes(mover.sections(128), [ids.size for ids in rows])]
        assert 1 < len({*sizes})
        blocks = [Block(device.allocate_host(128), 0) for _ in sizes]
        spans = sealed(mover, rows, blocks, 128)
        assert sizes == [span.stop for span in spans]
        scramble(pool, 3)
        mover.scatter(blocks, others, chunk_bytes=128, spans=spans).wait()
        for name in names:
            found, expected = pool.plane(name, 0).cpu(), before[name]
            if name.startswith("state"):
                found, expected = found[1], expected[0]
            assert torch.equal(expected, found)
        device.close()


def test_large_chunks_of_a_device_go_by_its_staging() -> None:
    """They are hashed when they have arrived."""
    with simulated("lazy") as name:
        device = AcceleratorDevice(name)
        geometry = GQA.bind(dtype="uint8", layer=2, token=8, head=1, head_dim=512, v_head_dim=64)
        pool = Pool.create(geometry, device, page_count=64)
        scramble(pool, 2)
        mover, slots, size_bytes = Mover(pool), np.arange(400, 0, -1), 512 * geometry.token_bytes
        blocks = [Block(device.allocate_host(size_bytes), 0)]
        spans = sealed(mover, [slots], blocks, size_bytes)
        expected = chunk_bytes(image_of(pool), slots)
        assert expected == bytes(blocks[0].bytes_view(len(expected)))
        assert spans_of([expected]) == spans
        device.close()


@pytest.mark.parametrize("count", [0, 2, 4])
def test_each_chunk_needs_a_block(count: int) -> None:
    """With fewer blocks less would move without an error, so nothing moves."""
    case = filled()
    mover, blocks = Mover(case.pool), make_blocks(count, 4 * 36, 0)
    before, rows = image_of(case.pool), [np.arange(10)]
    with pytest.raises(AssertionError, match=f"{count} blocks for 3 chunks"):
        mover.gather(rows, blocks, chunk_bytes=4 * TOKEN_BYTES).wait()
    assert all({GUARD} == set(block.slab.tolist()) for block in blocks)
    with pytest.raises(AssertionError, match=f"{count} blocks for 3 chunks"):
        mover.scatter(blocks, rows, chunk_bytes=4 * TOKEN_BYTES, spans=()).wait()
    assert same_image(before, image_of(case.pool))


def test_each_section_needs_its_blocks(device: CPUDevice) -> None:
    """The last section needs them, too: no later section would miss them."""
    geometry = RECURRENT_AND_FULL.bind(
        dtype="uint8", token=4,
        full_layer=2, full_head=2, full_head_dim=2, full_v_head_dim=2,
        state_layer=2, state_channel=2, state_width=2,
        state_head=2, state_head_dim=2, state_state=2,
    )  # fmt: skip
    pool = Pool.create(geometry, device, page_count=2, request_count=2)
    rows = [group.ids for group in pool.rows_of(np.arange(8), request=1)]
    mover = Mover(pool)
    count = len([*chunk_sizes(mover.sections(64), [ids.size for ids in rows])])
    blocks = make_blocks(count - 1, 64, 0)
    with pytest.raises(AssertionError, match=f"{count - 1} blocks for {count} chunks"):
        mover.gather(rows, blocks, chunk_bytes=64).wait()


def test_without_a_seal_there_are_no_spans() -> None:
    """The bytes arrive all the same."""
    case = filled()
    blocks = make_blocks(1, 4 * 36, 0)
    job = Mover(case.pool).gather([np.arange(4)], blocks, chunk_bytes=4 * TOKEN_BYTES, seal=False)
    assert [[]] == job.wait()
    assert chunk_bytes(image_of(case.pool), range(4)) == bytes(blocks[0].bytes_view(4 * 36))


def test_without_spans_nothing_is_checked() -> None:
    """A benchmark needs this to time only the copy."""
    case = filled()
    blocks = make_blocks(1, 36, 0)
    blocks[0].bytes_view(36)[:] = bytes(range(36))
    Mover(case.pool).scatter(blocks, [np.array([2])], chunk_bytes=4 * TOKEN_BYTES, spans=()).wait()
    assert bytes(range(36)) == chunk_bytes(image_of(case.pool), [2])


def test_the_first_damaged_chunk_is_named() -> None:
    """The error has both checksums, the length and the remedy."""
    case = filled()
    mover, blocks = Mover(case.pool), make_blocks(3, 4 * 36, 0)
    spans = sealed(mover, [np.arange(10)], blocks, 4 * TOKEN_BYTES)
    blocks[2].bytes_view(1)[0] ^= 1
    job = mover.scatter(blocks, [np.arange(10)], chunk_bytes=4 * TOKEN_BYTES, spans=spans)
    found = xxhash.xxh3_64_intdigest(blocks[2].bytes_view(72))
    message = f"chunk 2: 72 bytes.*checksum {found:016x}, sealed as 72 .*{spans[2][3]:016x}.*recom"
    with pytest.raises(SnapshotDamaged, match=message):
        job.wait()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("damaged", range(5))
def test_damage_anywhere_writes_nothing(lanes: int, damaged: int) -> None:
    """The chunks before it may be whole, and any number of lanes may run."""
    device = CPUDevice(lanes=lanes)
    case = make_pool("created", small_geometry(), device, 5)
    fill(case, 4)
    mover, blocks = Mover(case.pool), make_blocks(5, 4 * 36, 0)
    spans = sealed(mover, [np.arange(20)], blocks, 4 * TOKEN_BYTES)
    blocks[damaged].bytes_view(144)[-1] ^= 0x80
    fill(case, 5)
    before = image_of(case.pool)
    job = mover.scatter(blocks, [np.arange(20)], chunk_bytes=4 * TOKEN_BYTES, spans=spans)
    with pytest.raises(SnapshotDamaged, match=f"chunk {damaged}:"):
        job.wait()
    assert same_image(before, image_of(case.pool))
    device.close()


@pytest.mark.parametrize(
    "stops",
    [[512, 1024, 1536, 2048], [2048], [700, 701, 1500, 2048], [2049]],
    ids=["a span for each layer", "one for all", "across layers", "behind the last byte"],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_spans_that_are_checked_as_they_are_copied_find_all_damage(
    monkeypatch: pytest.MonkeyPatch, stops: list[int], lanes: int
) -> None:
    """Each byte is checked, however the spans lie beside the lanes' tasks: here one for a layer."""
    monkeypatch.setattr("kvtide.transfer.plan._LONG_CALL_BYTES", 1)
    monkeypatch.setattr("kvtide.form.SPAN_BYTES", 1)
    geometry = K_ONLY.bind(dtype="uint8", layer=4, token=1, head=1, head_dim=512)
    device = CPUDevice(lanes=lanes)
    device.chunk_bytes = 1
    case = make_pool("adopted", geometry, device, 8)
    mover, blocks, rows = Mover(case.pool), make_blocks(2, 2049, 0), [np.array([5, 2])]
    fill(case, 3)
    mover.gather(rows, blocks, chunk_bytes=2048).wait()
    wanted = image_of(case.pool)
    spans = [
        span._replace(chunk=chunk)
        for chunk, block in enumerate(blocks)
        for span in spans_at(bytes(block.bytes_view(2049)), stops)
    ]

    def load() -> None:
        mover.scatter(blocks, rows, chunk_bytes=2048, spans=spans, all_or_nothing=False).wait()

    for chunk, byte in ((0, 0), (0, 2047), (1, 511), (1, 700), (1, 1536)):
        blocks[chunk].bytes_view(2048)[byte] ^= 1
        with pytest.raises(SlotsLost, match=f"chunk {chunk}:"):
            load()
        blocks[chunk].bytes_view(2048)[byte] ^= 1
    fill(case, 4)
    expected = with_rows(image_of(case.pool), rows[0], wanted, rows[0])
    load()
    assert same_image(expected, image_of(case.pool))
    device.close()


def test_an_error_of_a_signal_handler_loses_no_slots() -> None:
    """It ends a wait, but not the job, which goes on writing."""

    class Job:
        def done(self) -> bool:
            return False

        def wait(self) -> list[list[Span]]:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        _WritingJob(Job(), writing=[True]).wait()


def test_views_of_buffers_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots differ each time, and a server runs for long."""
    monkeypatch.setattr("kvtide.transfer.mover._MOST_VIEWS", 6)
    case = filled()
    mover, blocks = Mover(case.pool), make_blocks(1, 16 * 36, 0)
    for first, count in ((0, 16), (1, 16), (2, 8), (0, 4), (1, 4), (0, 1), (3, 16)):
        sealed(mover, [np.arange(first, first + count)], blocks, 16 * TOKEN_BYTES)
        assert 1 <= sum(map(len, mover._views.values())) <= 6


def test_gather_and_scatter_return_before_anything_moves() -> None:
    """The device's queue decides when the bytes move."""
    device = LazyDevice()
    case = filled(device=device)
    before = image_of(case.pool)
    mover, blocks = Mover(case.pool), make_blocks(1, 4 * 36, 0)
    gathering = mover.gather([np.arange(4)], blocks, chunk_bytes=4 * TOKEN_BYTES)
    mover.scatter(blocks, [np.arange(4, 8)], chunk_bytes=4 * TOKEN_BYTES, spans=())
    assert 2 == device.queued_count
    assert {GUARD} == set(blocks[0].slab.tolist())
    assert same_image(before, image_of(case.pool))
    gathering.wait()
    assert chunk_bytes(before, range(4)) == bytes(blocks[0].bytes_view(4 * 36))
    assert same_image(before, image_of(case.pool))
    device.close()
    assert same_image(with_rows(before, range(4, 8), before, range(4)), image_of(case.pool))


def test_tensors_of_inference_mode_move() -> None:
    """Pool and blocks may be made in inference mode; torch refuses ordinary writes to them."""
    with torch.inference_mode():
        planes = {
            "k": [torch.rand(4, 1, 6).bfloat16() for _ in range(2)],
            "v": [torch.rand(4, 1, 3).bfloat16() for _ in range(2)],
        }
        blocks = make_blocks(1, 36, 0)
    device = CPUDevice(lanes=1)
    pool = Pool.adopt(small_geometry(), device, planes)
    before, mover = image_of(pool), Mover(pool)
    spans = sealed(mover, [np.array([1])], blocks, 1 * TOKEN_BYTES)
    mover.scatter(blocks, [np.array([3])], chunk_bytes=1 * TOKEN_BYTES, spans=spans).wait()
    assert same_image(with_rows(before, [3], before, [1]), image_of(pool))
    device.close()


@pytest.mark.parametrize("skip", [1, 8, 16])
def test_a_slab_may_be_a_slice_of_something_larger(skip: int) -> None:
    """Aligned or pinned memory often is one: a block's offset counts from the slab's beginning."""
    case = filled()
    before = image_of(case.pool)
    whole = torch.full((skip + 2 * 4 * 36,), GUARD, dtype=torch.uint8)
    blocks = [Block(whole[skip:], 0), Block(whole[skip:], 4 * 36)]
    mover = Mover(case.pool)
    spans = sealed(mover, [np.arange(7)], blocks, 4 * TOKEN_BYTES)
    assert chunk_bytes(before, range(4)) == bytes(blocks[0].bytes_view(4 * 36))
    assert (whole[:skip] == GUARD).all()
    mover.scatter(blocks, [np.arange(7, 14)], chunk_bytes=4 * TOKEN_BYTES, spans=spans).wait()
    assert same_image(with_rows(before, range(7, 14), before, range(7)), image_of(case.pool))


def test_a_plan_takes_little_memory_beside_what_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of rows in any place.

    A plan of all these rows of one byte would take eight times as much memory as moves.
    """
    monkeypatch.setattr("kvtide.transfer.plan._PLANNED_ROWS", 1 << 15)
    geometry = K_ONLY.bind(dtype="uint8", layer=8, token=1, head=1, head_dim=1)
    device = LazyDevice()
    pool = Pool.create(geometry, device, page_count=1 << 18)
    fill(PoolCase(pool, tuple(buffer.numpy() for buffer in pool.buffers)), 5)
    before = image_of(pool)
    source, target = np.random.default_rng(1).permutation(1 << 18).reshape(2, -1)
    blocks = make_blocks(16, 1 << 16, 0)
    mover = Mover(pool)
    tracemalloc.start()
    try:
        spans = sealed(mover, [source], blocks, 1 << 16)
        mover.scatter(blocks, [target], chunk_bytes=1 << 16, spans=spans).wait()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20
    assert same_image(with_rows(before, target, before, source), image_of(pool))
