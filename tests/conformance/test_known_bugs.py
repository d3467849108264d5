"""Defects known from the field: each test is of a whole kind, and its name says what must hold.

The numbers are those of the list of defects that kvtide was designed by: contract drift (K01 to
K11), state left behind (K12 to K22), order and aliasing (K23 to K35), index spaces (K37 to K46),
boundaries (K48 to K52), dtypes (K92 to K95). K40 (host capacity agreed between ranks) is in
engines/sglang/tests/test_keeper.py, since one process has one arena. Gathers under all schedules
(K23, K25, K28, K32) are also in tests/test_fences_simulated.py, where each fence is taken away.
"""

from __future__ import annotations

import inspect
import random
import threading
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch

import kvtide.npu
from kvtide.arena import HostArena
from kvtide.conformance import SAMPLES, PoolUnderTest, Sample, checks, refusals, ways
from kvtide.conformance.pool_under_test import KINDS
from kvtide.conformance.reference import Place, first_difference, restored
from kvtide.conformance.samples import sample
from kvtide.conformance.trips import make_trip
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, LayoutError, SlotError, SnapshotMiss
from kvtide.form import Section
from kvtide.layout import GQA, BufferRows, EveryNth, Layout, OfRequest, Plane, apply_rules
from kvtide.layout.dtypes import DTYPE_BYTES
from kvtide.pool import PageAllocator, Pool
from kvtide.seal import Span
from kvtide.tide import Tide
from kvtide.transfer.plan import buffer_sets, plan_chunks
from kvtide.transfer.run import Task
from support.lazy_device import LazyDevice
from support.pools import fill, image_of, make_pool, poison, same_image, small_geometry, with_rows
from support.tides import make_tide


def subject_of(name: str, device: CPUDevice, kind: str = "created") -> PoolUnderTest:
    """Makes a pool of that sample."""
    return KINDS[kind](sample(name), device)


def round_trip(subject: PoolUnderTest, count: int, seed: int = 0) -> None:
    """Makes a round trip and compares every byte."""
    way = ways.TideWay(subject, ways.block_sizes(subject)["some rows"])
    ways.go(way, make_trip(subject, count, seed), subject, seed=seed)


# ---- contract drift, pools not covered ------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_k01_planes_of_unequal_width_in_separate_buffers_come_back(
    device: CPUDevice, kind: str
) -> None:
    """Latent and rope have different widths; no attribute of another kind of pool is used."""
    round_trip(subject_of("mla_split", device, kind), 11)


@pytest.mark.parametrize("tried", SAMPLES, ids=lambda tried: tried.name)
def test_k02_snapshots_of_every_pool_have_the_same_form(device: CPUDevice, tried: Sample) -> None:
    """Created and adopted pools give the same chunks with the same bytes."""
    seals = []
    for kind in KINDS:
        subject = KINDS[kind](tried, device)
        trip = make_trip(subject, ways.some_tokens(subject), 1)
        subject.set_maps(trip.source.maps)
        subject.fill(1)
        image = {part: subject.read(*part) for part in subject.parts}
        for plane in subject.geometry.planes:
            for layer in range(plane.layer_count):
                data = image[plane.name, layer]
                data[:, : plane.row_bytes] = np.arange(plane.row_bytes, dtype=np.uint8)
                subject.write(plane.name, layer, data)
        way = ways.TideWay(subject, ways.block_sizes(subject)["some rows"])
        snapshot = way.save(trip.source.slots, trip.source.request)
        seals.append(snapshot.seal)
        way.drop(snapshot)
    assert [seals[0]] * len(KINDS) == seals


def pool_classes() -> list[type]:
    """Finds every class in kvtide.npu that makes host copies by SGLang's names."""
    found: list[type] = []
    for module in iter_modules(kvtide.npu.__path__):
        for member in vars(import_module(f"kvtide.npu.{module.name}")).values():
            if inspect.isclass(member) and hasattr(member, "get_cpu_copy"):
                found.append(member)
    return sorted(set(found), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("name", ["get_cpu_copy", "load_cpu_copy"])
def test_k03_k04_every_pool_takes_all_arguments_of_its_base(name: str) -> None:
    """The classes are found by looking, so that a new one can't be forgotten."""
    classes = pool_classes()
    assert len(classes) >= 3
    base = {"mamba_indices", "req_pool_index"}
    for kind in classes:
        given = inspect.signature(getattr(kind, name)).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given.values())
        assert takes_any or base <= given.keys(), kind


def test_k05_wrappers_forward_every_argument(device: CPUDevice) -> None:
    """retract and resume take what offload and restore take; a request's own row comes back."""
    for inner, outer in (("offload", "retract"), ("restore", "resume")):
        wanted = inspect.signature(getattr(Tide, inner)).parameters.keys() - {"slots"}
        assert wanted <= inspect.signature(getattr(Tide, outer)).parameters.keys()
    subject = subject_of("recurrent_and_full", device)
    pages = PageAllocator(subject.pool.page_count)
    arena = HostArena(device, limit_bytes=1 << 16, block_bytes=1 << 10)
    tide = Tide(subject.pool, arena, pages)
    held = pages.acquire(2)
    assert held is not None
    saved = subject.fill(1)
    snapshot = tide.retract(held, 7, key="r", request=1)
    before = subject.fill(2)
    other = pages.acquire(1)
    resumed = tide.resume(snapshot, 2, key="r", request=2)
    assert other is not None
    assert resumed is not None
    source = Place(tide.pool.slots_of(held)[:7].tolist(), 1, {})
    target = Place(tide.pool.slots_of(resumed)[:7].tolist(), 2, {})
    expected = restored(subject.geometry, saved, source, before, target)
    assert first_difference(expected, subject.image()) is None


def test_k06_pool_that_cannot_be_moved_is_refused_at_the_start(device: CPUDevice) -> None:
    """The tide refuses it when it is made, with the remedy, and not later under load."""
    subject = subject_of("mla_nz", device, "gaps between rows")
    arena = HostArena(device, limit_bytes=1 << 16, block_bytes=16)
    with pytest.raises(LayoutError, match="larger blocks"):
        Tide(subject.pool, arena)


def test_k09_absent_part_is_a_miss_and_nothing_is_half_written(device: CPUDevice) -> None:
    """A snapshot with index keys and a pool without them don't fit, in either direction."""
    plain, indexed = (
        subject_of(name, device) for name in ("mla_split", "mla_split-index-keys-on-some-layers")
    )
    refusals.check_miss(plain, indexed)
    refusals.check_miss(indexed, plain)


def test_k10_nothing_but_the_declared_planes_is_touched(device: CPUDevice) -> None:
    """An engine's pool may have tables that only another backend can read."""

    class Trapped(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    geometry = small_geometry()
    tensors = [torch.zeros(20, 1, width, dtype=torch.bfloat16) for width in (6, 6, 3, 3)]
    pool = Pool.adopt(geometry, device, Trapped(k=tensors[:2], v=tensors[2:]))
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=1 << 8))
    tide.discard(tide.offload([1, 2]))


@pytest.mark.parametrize("name", ["k_only", "gqa", "mla_split-index-scales"])
@pytest.mark.parametrize("kind", ["one tensor a layer", "one tensor for all layers"])
def test_k11_pools_have_one_tensor_or_any_number_of_unequal_ones(
    device: CPUDevice, name: str, kind: str
) -> None:
    """A pool may have one tensor, keys and values, or any number of planes."""
    round_trip(subject_of(name, device, kind), 5)


# ---- part of the state left behind ---------------------------------------------------------


@pytest.mark.parametrize("tried", SAMPLES, ids=lambda tried: tried.name)
def test_k12_k21_every_byte_that_a_token_owns_returns(device: CPUDevice, tried: Sample) -> None:
    """Every byte is overwritten before the restore: index keys, scales, tails and all others."""
    subject = KINDS["created"](tried, device)
    round_trip(subject, ways.some_tokens(subject))


@pytest.mark.parametrize("name", ["recurrent", "recurrent_and_full", "recurrent_and_mla"])
def test_k13_recurrent_state_comes_back_into_another_row(device: CPUDevice, name: str) -> None:
    """Its old row belongs to another request by then."""
    subject = subject_of(name, device)
    trip = make_trip(subject, 6, 3)
    assert trip.source.request != trip.target.request
    round_trip(subject, 6, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_k15_k95_no_number_of_planes_is_assumed(device: CPUDevice, count: int) -> None:
    """A layout may declare any number of planes, such as packed values, scales and biases."""
    planes = [Plane(f"p{number}", f"layer page token w{number}") for number in range(count)]
    sizes = {f"w{number}": 3 + 2 * number for number in range(count)}
    shapes = {f"p{number}": ("uint8", 2, (3 + 2 * number,)) for number in range(count)}
    many = Sample("many", Layout("many", *planes), "uint8", {"layer": 2, **sizes}, shapes)
    for kind in KINDS:
        round_trip(KINDS[kind](many, device), 9)


@pytest.mark.parametrize("name", ["target_and_draft", "mla_target_and_draft"])
def test_k16_pools_that_share_slots_move_together(device: CPUDevice, name: str) -> None:
    """The draft's KV moves with the target's, or neither moves."""
    subject = subject_of(name, device)
    refusals.check_failed_restores(subject)
    round_trip(subject, 7)


def test_k18_what_is_kept_beside_a_slot_moves_with_it(device: CPUDevice) -> None:
    """An array that has an entry for each slot is a plane."""
    layout = Layout("beside", *GQA.planes, Plane("seen", "page token", dtype="int32"))
    tried = Sample(
        "beside", layout, "bfloat16", {"layer": 2, "head": 1, "head_dim": 3, "v_head_dim": 5},
        {"k": ("bfloat16", 2, (1, 3)), "v": ("bfloat16", 2, (1, 5)), "seen": ("int32", 1, ())},
    )  # fmt: skip
    for kind in KINDS:
        round_trip(KINDS[kind](tried, device), 6)


def test_k20_checkpoints_of_a_state_come_back_with_it_or_are_named(
    device: CPUDevice,
) -> None:
    """Without its checkpoints a restored state could not be reused, so this is an error."""
    layout = Layout(
        "checkpointed",
        Plane("k", "layer page token 3"),
        Plane("state", "layer request 5", rows=(OfRequest("state"),)),
        Plane("checkpoint", "layer request 5", rows=(OfRequest("checkpoint"),)),
    )
    geometry = layout.bind(dtype="uint8", token=4, layer=2)
    pool = Pool.create(geometry, device, page_count=4, request_count=4)
    for name in ("k", "state", "checkpoint"):
        for layer in range(2):
            rows = pool.plane(name, layer)
            rows.copy_(torch.arange(rows.numel()).view(rows.shape) + layer)
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=256))
    with pytest.raises(SlotError, match="each checkpoint"):
        tide.offload(range(6), request={"state": 1})
    assert 0 == tide.arena.used_bytes
    snapshot = tide.offload(range(6), request={"state": 1, "checkpoint": 2})
    before = [buffer.clone() for buffer in pool.buffers]
    with pytest.raises(SlotError, match="each checkpoint"):
        tide.restore(snapshot, range(8, 14), request={"state": 3})
    assert all(map(torch.equal, before, pool.buffers))
    expected = [pool.plane("checkpoint", layer)[2].tolist() for layer in range(2)]
    tide.restore(snapshot, range(8, 14), request={"state": 3, "checkpoint": 0})
    tide.discard(snapshot)
    assert expected == [pool.plane("checkpoint", layer)[0].tolist() for layer in range(2)]


def test_k22_second_restore_gives_the_same_bytes_as_the_first(device: CPUDevice) -> None:
    """This holds for recurrent state, too."""
    checks.check_snapshot_owns(subject_of("recurrent_and_full", device))


# ---- order, lifetime, aliasing -------------------------------------------------------------


def test_k23_k32_offload_counts_only_when_it_is_done() -> None:
    """The device does nothing before somebody waits for it."""
    tide = make_tide(LazyDevice())
    ticket = tide.start_offload(range(8))
    assert not ticket.done()
    assert 0 == tide.stats.offloads
    tide.discard(ticket.wait())
    assert 1 == tide.stats.offloads


def test_k25_slots_are_not_freed_before_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When retract releases the pages, no queued job still reads them."""
    device = LazyDevice()
    tide = make_tide(device)
    pages = tide._books.acquire(2)
    assert pages is not None
    queued: list[int] = []
    release = PageAllocator.release

    def note_and_release(self: PageAllocator, pages: Any) -> None:
        queued.append(device.queued_count)
        release(self, pages)

    monkeypatch.setattr(PageAllocator, "release", note_and_release)
    tide.discard(tide.retract(pages, 8))
    assert [0] == queued


@pytest.mark.parametrize("count", [4, 8])
def test_k26_k48_last_block_is_saved_when_the_request_ends_at_its_boundary(
    device: CPUDevice, count: int
) -> None:
    """The length is a multiple of the page: whole pages, whole chunks, and windows of them."""
    for name in ("gqa", "gqa_hnd", "window", "window-of-pages"):
        round_trip(subject_of(name, device), count)


def test_k27_restore_is_legal_while_an_offload_is_pending() -> None:
    """The offload of another request was queued first and is done first; both are exact."""
    tide = make_tide(LazyDevice())
    before = image_of(tide.pool)
    snapshot = tide.offload(range(4))
    pending = tide.start_offload(range(4, 8))
    tide.restore(snapshot, range(8, 12))
    assert pending.done()
    tide.discard(snapshot)
    tide.discard(pending.wait())
    expected = with_rows(before, range(8, 12), before, range(4))
    assert same_image(expected, image_of(tide.pool))


def test_k28_host_memory_is_kept_until_the_restore_has_read_it() -> None:
    """Discarding a snapshot waits for its pending restore."""
    device = LazyDevice()
    tide = make_tide(device)
    snapshot = tide.offload(range(4))
    restoring = tide.start_restore(snapshot, range(8, 12))
    tide.discard(snapshot)
    assert 0 == device.queued_count
    restoring.wait()


def test_k29_offload_without_room_changes_nothing(device: CPUDevice) -> None:
    """It raises, isn't counted, takes no memory, and its pages stay held."""
    tide = make_tide(device, block_count=1)
    pages = tide._books.acquire(2)
    assert pages is not None
    with pytest.raises(ArenaFull):
        tide.retract(pages, 8)
    assert (0, 0, 2) == (tide.stats.offloads, tide.arena.used_bytes, tide._books.held_count)


@pytest.mark.parametrize("tried", SAMPLES, ids=lambda tried: tried.name)
def test_k33_snapshot_owns_its_memory(device: CPUDevice, tried: Sample) -> None:
    """A snapshot is a copy, not a view of slots that another request may have by now."""
    checks.check_snapshot_owns(KINDS["created"](tried, device))


def test_k34_a_snapshot_appears_only_when_it_is_complete(
    device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is slow; nobody gets the snapshot before its last byte is written."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    go_on, seal = threading.Event(), Task.seal

    def slow(task: Task) -> list[Span]:
        assert go_on.wait(60)
        return seal(task)

    monkeypatch.setattr(Task, "seal", slow)
    ticket = tide.start_offload(range(8))
    assert not ticket.done()
    assert 0 == tide.stats.offloads
    go_on.set()
    snapshot = ticket.wait()
    poison(tide.pool, range(20))
    poisoned = image_of(tide.pool)
    tide.restore(snapshot, range(12, 20))
    tide.discard(snapshot)
    expected = with_rows(poisoned, range(12, 20), before, range(8))
    assert same_image(expected, image_of(tide.pool))


def test_k35_uneven_chunks_do_not_overwrite_staged_ones(device: CPUDevice) -> None:
    """Two streams stage three chunks: no staging buffer is filled again before it was copied."""
    tide = make_tide(LazyDevice(seed=4), block_count=8)
    before = image_of(tide.pool)
    snapshot = tide.offload(range(11))
    poison(tide.pool, range(20))
    poisoned = image_of(tide.pool)
    tide.restore(snapshot, range(9, 20))
    tide.discard(snapshot)
    expected = with_rows(poisoned, range(9, 20), before, range(11))
    assert same_image(expected, image_of(tide.pool))


# ---- index spaces --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["compressed_4", "compressed_4-pending", "compressed_128", "window_and_full", "dsa-tails"],
)
def test_k37_each_plane_keeps_its_own_map(device: CPUDevice, name: str) -> None:
    """The maps divide by 4 or 128, or are windows or rings; the target rows aren't consecutive."""
    subject = subject_of(name, device)
    for seed, count in enumerate((1, ways.some_tokens(subject))):
        round_trip(subject, count, seed)


@pytest.mark.parametrize(("first", "count"), [(0, 21), (21, 23), (5, 3)])
def test_k38_k39_layers_count_from_the_stages_first(
    device: CPUDevice, first: int, count: int
) -> None:
    """Stages have different sizes: layers are counted from the stage's first, and don't mix."""
    sizes = {"layer": count, "head": 1, "head_dim": 3, "v_head_dim": 5}
    shapes = {"k": ("uint8", count, (1, 3)), "v": ("uint8", count, (1, 5))}
    stage = Sample("stage", GQA, "uint8", sizes, shapes, first_layer=first)
    subject = KINDS["created"](stage, device)
    checks.check_planes(subject)
    round_trip(subject, 6)
    other = Sample("stage", GQA, "uint8", sizes, shapes, first_layer=first + 1)
    refusals.check_miss(subject, KINDS["created"](other, device))


def test_k41_replaced_map_is_read_again(device: CPUDevice) -> None:
    """Every call reads the map; what the call before it read doesn't count."""
    subject = subject_of("window", device)
    slots = np.arange(8)
    for rows in (range(1, 9), range(8, 0, -1)):
        held = np.zeros(subject.pool.slot_count, np.int64)
        held[slots] = [*rows]
        subject.set_maps({"full_to_window": held})
        (found,) = subject.pool.rows_of(slots)
        assert [*rows] == found.ids.tolist()


def test_k42_last_row_is_usable_and_row_0_of_a_window_is_not_touched(device: CPUDevice) -> None:
    """A window with N usable rows has N + 1, since row 0 is reserved."""
    subject = subject_of("window", device)
    last = subject.row_counts["k"] - 1
    held = np.zeros(subject.pool.slot_count, np.int64)
    held[3] = last
    subject.set_maps({"full_to_window": held})
    image = subject.fill(1)
    way = ways.TideWay(subject, 1 << 10)
    snapshot = way.save([2, 3], None)
    poisoned = subject.fill(2)
    way.load(snapshot, [2, 3], None)
    way.drop(snapshot)
    for part, rows in subject.image().items():
        assert image[part][last].tolist() == rows[last].tolist()
        assert poisoned[part][:last].tolist() == rows[:last].tolist()


def test_k44_offsets_have_64_bits() -> None:
    """The rows lie beyond 2**31 and 2**32 bytes: they are planned, but never moved here."""
    layers = np.array([0, 1 << 31], np.int64)
    ids = np.array([(1 << 31) - 1, 5], np.int64)
    section = Section(0, (0,), (range(2),), (1 << 12,), 1, 2)
    sets = buffer_sets(section, [BufferRows(1 << 12, layers)])
    (plan,) = plan_chunks(section, sets, ids, 0, 1 << 30, 1 << 30)
    assert [[(1 << 31) - 1, 5, (1 << 32) - 1, (1 << 31) + 5]] == [
        units for buffers in plan[1] for units in buffers.units.tolist()
    ]
    with pytest.raises(SlotError, match=str(1 << 40)):
        apply_rules([EveryNth(1)], np.array([1 << 40]), {}, 100)


def test_k45_acquired_pages_are_unique_in_range_and_not_held() -> None:
    """The test acquires and releases at random many times."""
    rng, pages = random.Random(3), PageAllocator(17)
    live: list[list[int]] = []
    for _ in range(500):
        if live and rng.random() < 0.5:
            pages.release(live.pop(rng.randrange(len(live))))
        else:
            taken = pages.acquire(rng.randint(0, 5))
            live += [taken] if taken is not None else []
        held = [page for pages in live for page in pages]
        assert len(held) == len({*held}) == pages.held_count
        assert all(0 <= page < 17 for page in held)
        assert 17 == pages.free_count + pages.held_count


def test_k46_requests_that_share_a_prefix_share_no_state(device: CPUDevice) -> None:
    """Two requests have the same slots; each gets its own row back."""
    subject = subject_of("recurrent_and_full", device)
    way = ways.TideWay(subject, 1 << 10)
    saved = subject.fill(1)
    snapshots = [way.save([4, 5, 6], request) for request in (0, 1)]
    before = subject.fill(2)
    for snapshot, request in zip(snapshots, (1, 0), strict=True):
        way.load(snapshot, [9, 10, 11], request)
    for request, snapshot in enumerate(snapshots):
        source, target = Place([4, 5, 6], request, {}), Place([9, 10, 11], 1 - request, {})
        before = restored(subject.geometry, saved, source, before, target)
        way._tides[0].discard(snapshot)
    assert first_difference(before, subject.image()) is None


# ---- boundaries -----------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_k50_pages_and_memory_are_given_back_for_all_lengths(
    device: CPUDevice, page_size: int
) -> None:
    """For all lengths and page sizes, pages and host memory are free again in the end."""
    geometry = small_geometry(token=page_size)
    pool = make_pool("created", geometry, device, 5).pool
    arena = HostArena(device, limit_bytes=1 << 16, block_bytes=256)
    for count in range(3 * page_size + 1):
        pages = PageAllocator(5)
        tide = Tide(pool, arena, pages)
        held = pages.acquire(-(-count // page_size))
        assert held is not None
        resumed = tide.resume(tide.retract(held, count), len(held))
        assert resumed is not None
        pages.release(resumed)
        assert (5, 0, 0) == (pages.free_count, pages.held_count, arena.used_bytes)


def test_k51_token_without_kv_is_neither_saved_nor_written(device: CPUDevice) -> None:
    """An engine counts a request's newest token before its KV exists; it says how many to save."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    pages = tide._books.acquire(2)
    other = tide._books.acquire(3)
    assert pages is not None
    assert other is not None
    snapshot = tide.retract(pages, 7)
    assert 7 == snapshot.token_count
    tide._books.release(other)
    resumed = tide.resume(snapshot, 2)
    assert resumed is not None
    expected = with_rows(
        before, tide.pool.slots_of(resumed)[:7], before, tide.pool.slots_of(pages)[:7]
    )
    assert same_image(expected, image_of(tide.pool))


@pytest.mark.parametrize("tried", SAMPLES, ids=lambda tried: tried.name)
def test_k52_no_tokens_is_a_valid_request(device: CPUDevice, tried: Sample) -> None:
    """Only the request's own rows move."""
    round_trip(KINDS["created"](tried, device), 0)


# ---- dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_k92_k93_bytes_of_every_dtype_come_back(device: CPUDevice, dtype: str, kind: str) -> None:
    """torch and numpy lack kernels for some of these dtypes; the bytes include NaN and -0."""
    sizes = {"layer": 2, "head": 1, "head_dim": 5, "v_head_dim": 3}
    shapes = {"k": (dtype, 2, (1, 5)), "v": (dtype, 2, (1, 3))}
    round_trip(KINDS[kind](Sample(dtype, GQA, dtype, sizes, shapes), device), 9)


def test_k94_dtype_is_recorded_and_nothing_is_cast(device: CPUDevice) -> None:
    """float16 and bfloat16 have equal widths, but a snapshot of one is a miss for the other."""
    pools = [
        make_pool("created", small_geometry(dtype=dtype), device, 4)
        for dtype in ("float16", "bfloat16")
    ]
    for case in pools:
        fill(case, 1)
    first, second = (
        Tide(case.pool, HostArena(device, limit_bytes=1 << 12, block_bytes=1 << 8))
        for case in pools
    )
    before = image_of(second.pool)
    snapshot = first.offload([1, 2, 3])
    with pytest.raises(SnapshotMiss, match="geometry"):
        second.restore(snapshot, [1, 2, 3])
    assert same_image(before, image_of(second.pool))
    first.discard(snapshot)
