"""A snapshot belongs to no device and to no pool, and its form never changes.

It restores wherever its bytes fit, and its form is the one that is committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from kvtide.arena import HostArena, Lease
from kvtide.conformance.pool_under_test import KINDS, PoolUnderTest
from kvtide.conformance.reference import map_holes
from kvtide.conformance.samples import sample
from kvtide.device import AcceleratorDevice, CPUDevice, Device
from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss
from kvtide.layout import GQA, Geometry
from kvtide.layout.gqa import GQA_HND, K_ONLY
from kvtide.pool import Pool
from kvtide.seal import Seal, Span
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from support.pools import (
    POOL_KINDS,
    fill,
    image_of,
    make_pool,
    same_image,
    scramble,
    small_geometry,
    with_rows,
)
from support.simulated import SCHEDULES, simulated

FORMS = Path(__file__).parent / "snapshot_forms"
SOURCE, TARGET = [9, 2, 3, 7, 6, 14, 15, 1], [12, 0, 19, 1, 5, 8, 17, 16]


@pytest.fixture(scope="module")
def device() -> Iterator[CPUDevice]:
    """A CPU device of two lanes."""
    device = CPUDevice(lanes=2)
    yield device
    device.close()


def arena_for(device: Device, block_bytes: int) -> HostArena:
    """Makes an arena of eight blocks."""
    return HostArena(device, limit_bytes=8 * block_bytes, block_bytes=block_bytes)


# ---- across devices -----------------------------------------------------------------------------

LAYER_BYTES = 1 << 20


def layers_of_a_mib(device: Device, task_mib: int, seed: int) -> Tide:
    """Makes a tide of six layers whose rows have 128 KiB, with blocks of 6 MiB.

    Eight tokens are a MiB in each layer. The device takes `task_mib` at once.
    """
    device.chunk_bytes = task_mib << 20  # type: ignore[misc] # devices choose it themselves
    geometry = K_ONLY.bind(dtype="uint8", layer=6, token=4, head=1, head_dim=LAYER_BYTES // 8)
    pool = Pool.create(geometry, device, page_count=5)
    scramble(pool, seed)
    return Tide(pool, arena_for(device, 6 * LAYER_BYTES))


def check_there(source: Tide, target: Tide) -> None:
    """Moves a snapshot between the tides; a flipped bit is found, and nothing is written then."""
    saved, before = image_of(source.pool), image_of(target.pool)
    snapshot = source.offload(SOURCE, key="k")
    assert [(0, n * LAYER_BYTES, (n + 1) * LAYER_BYTES) for n in range(6)] == [
        span[:3] for span in snapshot.seal.spans
    ]
    memory = snapshot.lease.blocks[0].bytes_view(6 * LAYER_BYTES)
    for layer in range(6):
        memory[layer * LAYER_BYTES + 77] ^= 4
        with pytest.raises(SnapshotDamaged, match=f"chunk 0: 1048576 bytes.* {layer << 20} "):
            target.restore(snapshot, TARGET, key="k")
        memory[layer * LAYER_BYTES + 77] ^= 4
    assert same_image(before, image_of(target.pool))
    target.restore(snapshot, TARGET, key="k")
    assert same_image(with_rows(before, TARGET, saved, SOURCE), image_of(target.pool))
    source.discard(snapshot)


@pytest.mark.parametrize("there", [1, 3, 4, 8])
@pytest.mark.parametrize("here", [1, 3, 4, 8])
def test_a_snapshot_moves_between_devices_with_other_task_sizes(here: int, there: int) -> None:
    """Sizes are in MiB. The form doesn't depend on how much a device takes at once."""
    devices = [CPUDevice(lanes=2), CPUDevice(lanes=2)]
    source, target = (
        layers_of_a_mib(device, task_mib, task_mib)
        for device, task_mib in zip(devices, (here, there), strict=True)
    )
    check_there(source, target)
    for device in devices:
        device.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("task_mib", [1, 3, 8])
def test_a_snapshot_moves_from_a_cpu_to_an_accelerator_and_back(
    schedule: str, task_mib: int
) -> None:
    """The simulated accelerator does nothing before somebody waits for it."""
    with simulated(schedule) as name:
        cpu, accelerator = CPUDevice(lanes=2), AcceleratorDevice(name)
        near = layers_of_a_mib(cpu, 4, 1)
        far = layers_of_a_mib(accelerator, task_mib, 2)
        check_there(near, far)
        check_there(far, near)
        check_there(far, far)
        cpu.close()
        accelerator.close()


def test_equal_bytes_have_equal_seals_on_every_device() -> None:
    """The snapshots have several chunks, of which the last is short."""
    seals = []
    with simulated("lazy") as name:
        for device in (CPUDevice(lanes=1), CPUDevice(lanes=2), AcceleratorDevice(name)):
            pool = Pool.create(small_geometry(), device, page_count=5)
            scramble(pool, 3)
            tide = Tide(pool, arena_for(device, 4 * 36))
            snapshot = tide.offload(SOURCE[:7], key="k")
            seals.append(snapshot.seal.to_json())
            tide.discard(snapshot)
            device.close()
    assert 1 == len({*seals})
    assert 2 == len(Seal.from_json(seals[0]).spans)


# ---- across pools -------------------------------------------------------------------------------


@pytest.mark.parametrize("there", POOL_KINDS)
@pytest.mark.parametrize("here", POOL_KINDS)
@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 20])
def test_a_snapshot_moves_between_pools_with_other_storage(
    device: CPUDevice, here: str, there: str, page_size: int
) -> None:
    """Pools have a tensor for each layer, one for all, or slices at odd addresses; pages differ."""
    source = make_pool(here, small_geometry(), device, 5)
    target = make_pool(there, small_geometry(token=page_size), device, 20 // page_size)
    fill(source, 1)
    fill(target, 2)
    saved, before = image_of(source.pool), image_of(target.pool)
    arena = arena_for(device, 3 * 36)
    snapshot = Tide(source.pool, arena).offload(SOURCE)
    Tide(target.pool, arena).restore(snapshot, TARGET)
    assert same_image(with_rows(before, TARGET, saved, SOURCE), image_of(target.pool))
    snapshot.lease.release()


def of_heads(layout: Any, heads: int, page_size: int) -> Geometry:
    """Binds keys and values of unequal width in that layout."""
    geometry: Geometry = layout.bind(
        dtype="float16", layer=2, token=page_size, head=heads, head_dim=6, v_head_dim=3
    )
    return geometry


def tensors_of(geometry: Geometry, layout: Any, seed: int) -> dict[str, list[torch.Tensor]]:
    """Makes an engine's tensors: [page, token, head, width] or [page, head, token, width]."""
    tensors: dict[str, list[torch.Tensor]] = {}
    sizes, page_size = dict(geometry.sizes), geometry.page_size
    torch.manual_seed(seed)
    for name, axis in (("k", "head_dim"), ("v", "v_head_dim")):
        inner = (page_size, sizes["head"]) if layout is GQA else (sizes["head"], page_size)
        shape = (20 // page_size, *inner, sizes[axis])
        tensors[name] = [torch.randint(0, 999, shape).to(torch.float16) for _ in range(2)]
    return tensors


def by_token(tensor: torch.Tensor, layout: Any) -> torch.Tensor:
    """Copies a tensor as [slot, head, width]."""
    tokens = tensor if layout is GQA else tensor.transpose(1, 2)
    return tokens.reshape(20, *tokens.shape[2:]).clone()


@pytest.mark.parametrize(("here", "there"), [(GQA, GQA_HND), (GQA_HND, GQA), (GQA_HND, GQA_HND)])
@pytest.mark.parametrize(
    ("heads", "page_sizes"), [(1, (4, 4)), (1, (4, 2)), (1, (5, 1)), (3, (1, 1))]
)
def test_a_snapshot_moves_from_nhd_to_hnd_if_a_tokens_bytes_are_equal(
    device: CPUDevice, here: Any, there: Any, heads: int, page_sizes: tuple[int, int]
) -> None:
    """With a single head, or with a single token in a page, both orders are the same."""
    tides, tensors = [], []
    for layout, page_size, seed in ((here, page_sizes[0], 1), (there, page_sizes[1], 2)):
        geometry = of_heads(layout, heads, page_size)
        tensors.append(tensors_of(geometry, layout, seed))
        pool = Pool.adopt(geometry, device, tensors[-1])
        tides.append(Tide(pool, arena_for(device, 3 * geometry.token_bytes)))
    saved = {n: [by_token(t, here) for t in found] for n, found in tensors[0].items()}
    before = {n: [by_token(t, there) for t in found] for n, found in tensors[1].items()}
    snapshot = tides[0].offload(SOURCE)
    tides[1].restore(snapshot, TARGET)
    tides[0].discard(snapshot)
    for name, found in tensors[1].items():
        for layer, tensor in enumerate(found):
            before[name][layer][TARGET] = saved[name][layer][SOURCE]
            assert torch.equal(before[name][layer], by_token(tensor, there))


@pytest.mark.parametrize(
    ("here", "there", "line"),
    [
        ((GQA, 2, 4), (GQA_HND, 2, 4), "plane 'k': one row for each page here, token there"),
        ((GQA_HND, 2, 4), (GQA_HND, 2, 2), "plane 'k': token 2 here, 4 there"),
        ((GQA, 2, 4), (GQA, 4, 4), "plane 'k': head 4 here, 2 there; plane 'v': head 4 here, 2"),
    ],
)
def test_each_difference_of_geometries_has_a_line(
    device: CPUDevice, here: Any, there: Any, line: str
) -> None:
    """The order of heads, the tokens in a row, and the number of heads on a rank differ."""
    source, target = (Pool.create(of_heads(*form), device, page_count=5) for form in (here, there))
    arena = arena_for(device, 1 << 10)
    snapshot = Tide(source, arena).offload(range(4))
    with pytest.raises(SnapshotMiss, match=f"here: the target, there: the snapshot.*{line}"):
        Tide(target, arena).restore(snapshot, range(4))
    snapshot.lease.release()


# ---- out of the process and back ----------------------------------------------------------------


def test_a_snapshot_becomes_json_and_bytes_and_comes_back(device: CPUDevice) -> None:
    """It comes into another arena with larger blocks, and is checked without a pool."""
    case = make_pool("created", small_geometry(), device, 5)
    fill(case, 1)
    saved = image_of(case.pool)
    tide = Tide(case.pool, arena_for(device, 3 * 36))
    snapshot = tide.offload(SOURCE, key="k")
    snapshot.verify()
    seal, chunks = snapshot.seal.to_json(), [bytes(chunk) for chunk in snapshot.chunks]
    tide.discard(snapshot)
    scramble(case.pool, 2)
    before = image_of(case.pool)
    other = Tide(case.pool, arena_for(device, 1 << 10))
    loaded = Snapshot.load(other.arena, Seal.from_json(seal), chunks)
    assert len(chunks) * 1024 == loaded.size_bytes == other.arena.used_bytes
    loaded.verify()
    other.restore(loaded, TARGET, key="k")
    assert same_image(with_rows(before, TARGET, saved, SOURCE), image_of(case.pool))
    other.discard(loaded)


def test_chunks_are_read_only_and_invalid_after_discard(device: CPUDevice) -> None:
    """They are the snapshot's memory, not copies."""
    case = make_pool("created", small_geometry(), device, 5)
    tide = Tide(case.pool, arena_for(device, 3 * 36))
    snapshot = tide.offload(SOURCE)
    assert [72, 72, 72, 72] == [len(chunk) for chunk in snapshot.chunks]
    with pytest.raises(TypeError):
        snapshot.chunks[0][0] = 1
    tide.discard(snapshot)
    for read in (lambda: snapshot.chunks, snapshot.verify):
        with pytest.raises(SnapshotMiss, match="discarded"):
            read()


@pytest.mark.parametrize(
    ("block_bytes", "limit_blocks", "error"),
    [(71, 8, SnapshotMiss), (72, 3, ArenaFull), (72, 4, None)],
)
def test_a_snapshot_that_an_arena_cannot_hold_takes_nothing(
    device: CPUDevice, block_bytes: int, limit_blocks: int, error: Any
) -> None:
    """The arena's blocks are too small for the chunks, or too few."""
    case = make_pool("created", small_geometry(), device, 5)
    snapshot = Tide(case.pool, arena_for(device, 2 * 36)).offload(SOURCE)
    arena = HostArena(device, limit_bytes=limit_blocks * block_bytes, block_bytes=block_bytes)
    if error is None:
        Snapshot.load(arena, snapshot.seal, snapshot.chunks).lease.release()
    else:
        with pytest.raises(error):
            Snapshot.load(arena, snapshot.seal, snapshot.chunks)
    assert 0 == arena.used_bytes
    snapshot.lease.release()


@pytest.mark.parametrize("chunk_bytes", [576, 1 << 40, 2**63 - 1])
def test_a_seal_cannot_make_a_device_allocate_memory(chunk_bytes: int) -> None:
    """The seal states the chunks' size, but staging is only as large as the actual chunk."""
    with simulated("lazy") as name:
        device = AcceleratorDevice(name)
        pool = Pool.create(small_geometry(), device, page_count=5)
        scramble(pool, 3)
        saved, tide = image_of(pool), Tide(pool, arena_for(device, 576))
        snapshot = tide.offload(SOURCE)
        snapshot.seal = replace(snapshot.seal, chunk_bytes=chunk_bytes)
        tide.restore(snapshot, TARGET)
        assert same_image(with_rows(saved, TARGET, saved, SOURCE), image_of(pool))
        assert [8 * 36] * 2 == [stream._staging.numel() for stream in device._streams]
        tide.discard(snapshot)
        device.close()


@pytest.mark.parametrize("stop", [0, 1, 71])
def test_bytes_that_no_span_covers_are_never_restored(device: CPUDevice, stop: int) -> None:
    """A hostile seal may be consistent, and yet cover fewer bytes than a restore would write."""
    pool = Pool.create(small_geometry(), device, page_count=5)
    scramble(pool, 3)
    tide, before = Tide(pool, arena_for(device, 2 * 36)), image_of(pool)
    snapshot = tide.offload(SOURCE)
    last = Span(3, 0, stop, xxhash.xxh3_64_intdigest(snapshot.chunks[3][:stop]))
    spans = (*snapshot.seal.spans[:3], *([last] if stop else []))
    seal = Seal.from_json(replace(snapshot.seal, spans=spans).to_json())
    assert 4 == len(snapshot.seal.spans)
    loaded = Snapshot.load(tide.arena, seal, snapshot.chunks[: 4 if stop else 3])
    for restore in (tide.restore, tide.start_restore):
        with pytest.raises(SnapshotMiss, match=f"{stop} bytes in chunk 3, the target has 72"):
            restore(loaded, TARGET)
    assert same_image(before, image_of(pool))
    tide.discard(snapshot)
    tide.discard(loaded)


def test_chunk_sizes_of_many_snapshots_are_forgotten(device: CPUDevice) -> None:
    """Each size takes some memory, and a seal may state any."""
    tide = Tide(Pool.create(small_geometry(), device, page_count=5), arena_for(device, 576))
    snapshot = tide.offload(SOURCE)
    for number in range(100):
        snapshot.seal = replace(snapshot.seal, chunk_bytes=576 + number)
        tide.restore(snapshot, TARGET)
    assert len(tide._mover._sections) <= 16
    tide.discard(snapshot)


def test_split_rows_do_not_restore_into_rows_with_gaps(device: CPUDevice) -> None:
    """The snapshot splits each row into two chunks, and this pool can't write half a row."""
    geometry = K_ONLY.bind(dtype="uint8", layer=1, token=1, head=1, head_dim=64)
    source = Tide(Pool.create(geometry, device, page_count=20), arena_for(device, 32))
    padded = torch.zeros(20, 1, 80, dtype=torch.uint8)[:, :, :64]
    target = Tide(Pool.adopt(geometry, device, {"k": [padded]}), arena_for(device, 64))
    snapshot = source.offload([3, 4])
    with pytest.raises(SnapshotMiss, match=r"chunks of 32 bytes, .*gaps.*recompute this request"):
        target.restore(snapshot, [5, 6])
    source.discard(snapshot)


def test_damaged_bytes_are_never_loaded(device: CPUDevice) -> None:
    """The test changes each byte of each chunk."""
    case = make_pool("created", small_geometry(), device, 5)
    fill(case, 4)
    arena = arena_for(device, 2 * 36)
    snapshot = Tide(case.pool, arena).offload(SOURCE[:3])
    chunks = [bytearray(chunk) for chunk in snapshot.chunks]
    for chunk in chunks:
        for place in range(len(chunk)):
            chunk[place] ^= 0x10
            with pytest.raises(SnapshotDamaged):
                Snapshot.load(arena, snapshot.seal, [bytes(one_chunk) for one_chunk in chunks])
            chunk[place] ^= 0x10
    assert snapshot.size_bytes == arena.used_bytes
    snapshot.lease.release()


def test_bytes_that_change_while_they_are_loaded_are_damage(
    device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may write to shared memory; the copy is checked, and its blocks are freed."""
    case = make_pool("created", small_geometry(), device, 5)
    arena = arena_for(device, 2 * 36)
    snapshot = Tide(case.pool, arena).offload(SOURCE[:2])
    seal, chunk, extend = snapshot.seal, bytearray(snapshot.chunks[0]), Lease.extend
    snapshot.lease.release()

    def extend_and_change(lease: Lease, block_count: int) -> None:
        extend(lease, block_count)
        chunk[40] ^= 1

    monkeypatch.setattr(Lease, "extend", extend_and_change)
    with pytest.raises(SnapshotDamaged):
        Snapshot.load(arena, seal, [memoryview(chunk)])
    assert 0 == arena.used_bytes


# ---- golden -------------------------------------------------------------------------------------

GOLDEN = ("gqa", "dsa-tails", "mla_nz-one-tile", "window_and_full", "recurrent_and_full")
HELD, HELD_TOO = range(8, 18), range(28, 38)


def golden_subject(name: str, kind: str, device: Device, *, is_filled: bool) -> PoolUnderTest:
    """Makes a pool of a sample. If it is filled, each byte follows from its place.

    Of the ten tokens at HELD, and of those at HELD_TOO, the last five are in the window if there
    is one.
    """
    subject = KINDS[kind](sample(name), device)
    widths = {plane.name: plane.row_bytes for plane in subject.geometry.planes}
    for number, part in enumerate(subject.parts):
        count, size = subject.read(*part).shape  # with the gap behind a row
        places = np.arange(count)[:, None] * widths[part[0]] + np.arange(size)
        values = (places * 31 + 7 * number) % 251 if is_filled else places * 0
        subject.write(*part, values.astype(np.uint8))
    for map_name in map_holes(subject.geometry):
        ids = np.full(subject.pool.slot_count, -1, np.int64)
        ids[HELD[5:]] = ids[HELD_TOO[5:]] = [3, 1, 8, 2, 10]
        subject.set_maps({map_name: ids})
    return subject


def golden_form(
    subject: PoolUnderTest, device: Device, slots: range, request: int
) -> dict[str, Any]:
    """Returns the whole form of a snapshot, as it is committed."""
    tide = Tide(subject.pool, arena_for(device, 640))
    request_row = request if subject.request_count else None
    snapshot = tide.offload(slots, key="golden", request=request_row)
    form = {
        "seal": json.loads(snapshot.seal.to_json()),
        "chunks": [chunk.hex() for chunk in snapshot.chunks],
    }
    tide.discard(snapshot)
    return form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GOLDEN)
def test_the_form_equals_the_committed_one(device: CPUDevice, name: str, kind: str) -> None:
    """Snapshots of this form may be on disks. Never change a committed file.

    A new form needs a new version with its own files, and the old files must still be read.
    """
    committed = json.loads((FORMS / f"{name}.json").read_text("ascii"))
    subject = golden_subject(name, kind, device, is_filled=True)
    assert committed == golden_form(subject, device, HELD, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GOLDEN)
def test_the_committed_form_is_still_read(device: CPUDevice, name: str, kind: str) -> None:
    """The snapshot restores into an empty pool, and a new snapshot of it has the same form."""
    committed = json.loads((FORMS / f"{name}.json").read_text("ascii"))
    subject = golden_subject(name, kind, device, is_filled=False)
    tide = Tide(subject.pool, arena_for(device, 640))
    chunks = [bytes.fromhex(chunk) for chunk in committed["chunks"]]
    snapshot = Snapshot.load(tide.arena, Seal.from_json(json.dumps(committed["seal"])), chunks)
    request_row = 2 if subject.request_count else None
    tide.restore(snapshot, HELD_TOO, key="golden", request=request_row)
    tide.discard(snapshot)
    assert committed == golden_form(subject, device, HELD_TOO, 2)
