from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import AcceleratorDevice, Device, Step, open_device
from kvtide.errors import SnapshotDamaged, UsageError
from kvtide.layout import Geometry
from kvtide.pool import Pool
from kvtide.tide import Tide
from support.jobs import submit
from support.pools import image_of, poison, same_image, scramble, small_geometry, with_rows
from support.simulated import SCHEDULES, simulated
from support.tides import damage

PATIENCE_S = 30


@pytest.fixture(params=SCHEDULES)
def npu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on the simulated accelerator in each schedule."""
    with simulated(request.param) as name:
        yield name


@pytest.fixture
def lazy_npu() -> Iterator[str]:
    """The simulated accelerator, which does nothing before somebody waits for it."""
    with simulated("lazy") as name:
        yield name


@pytest.fixture
def device(npu: str) -> Iterator[AcceleratorDevice]:
    """A device that copies in its own threads."""
    device = AcceleratorDevice(npu)
    yield device
    device.close()


def test_devices_open_by_name_and_index(lazy_npu: str) -> None:
    """A name without an index is the current device."""
    for name, expected in ((lazy_npu, 0), ("npu:0", 0), ("npu:1", 1)):
        device: Device = open_device(name)
        assert (name, torch.device("npu", expected)) == (device.name, device.torch_device)
        device.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "'cuda' isn't known here; known are: cpu, npu"),
        ("npu:2", "'npu:2' isn't here; of npu there are 0 to 1"),
        ("npu:-1", "'npu:-1' isn't here"),
        ("npu:x", "'npu:x' isn't here"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(lazy_npu: str, name: str, message: str) -> None:
    """The message lists the existing devices."""
    with pytest.raises(UsageError, match=message):
        open_device(name)


def test_device_memory_is_zeroed_and_host_memory_pinned(device: AcceleratorDevice) -> None:
    """Both have the requested size and dtype uint8."""
    memory, host = device.allocate(1000), device.allocate_host(1000)
    assert (device.torch_device, torch.uint8) == (memory.device, memory.dtype)
    assert [0] * 1000 == memory.tolist()
    assert (True, "cpu", (1000,)) == (host.is_pinned(), host.device.type, tuple(host.shape))


def test_host_memory_that_cannot_be_pinned_is_pageable(
    lazy_npu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning says which limit to raise."""
    empty = torch.empty

    def refuse(*sizes: int, **options: object) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("cannot lock memory\nmore lines")
        return empty(*sizes, **options)  # type: ignore[call-overload,no-any-return]

    device = AcceleratorDevice(lazy_npu)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(RuntimeWarning, match=r"\(cannot lock memory\).*ulimit -l unlimited"):
        host = device.allocate_host(64)
    monkeypatch.undo()
    assert (False, (64,)) == (host.is_pinned(), tuple(host.shape))
    device.close()


@pytest.mark.parametrize("index", ["int64", "int32"])
@pytest.mark.parametrize("pinned", [True, False])
def test_saved_bytes_come_back_into_other_slots(npu: str, pinned: bool, index: str) -> None:
    """No other byte changes, with pinned and pageable memory; slots may lie on the device."""
    device = AcceleratorDevice(npu)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if not pinned:
            patch.setattr(
                device, "allocate_host", lambda size: torch.empty(size, dtype=torch.uint8)
            )
        tide = make_tide_on(device)
        before = image_of(tide.pool)
        order = np.random.default_rng(0).permutation(20)
        source, target = order[:9], order[10:19]
        slots = torch.tensor(source).to(npu, getattr(torch, index))
        snapshot = tide.offload(slots.cpu())
        assert pinned == snapshot.lease.blocks[0].slab.is_pinned()
        poison(tide.pool, source)
        poisoned = image_of(tide.pool)
        tide.restore(snapshot, target)
        expected = with_rows(poisoned, target, before, source)
        assert same_image(expected, image_of(tide.pool))
        tide.discard(snapshot)
        device.close()


def make_tide_on(device: Device, *, block_count: int = 8, geometry: Geometry | None = None) -> Tide:
    """Like `make_tide`, on any device: pages of 4 tokens, with a block for each page."""
    geometry = geometry or small_geometry()
    pool = Pool.create(geometry, device, page_count=5)
    scramble(pool, 1)
    block_bytes = 4 * geometry.token_bytes
    arena = HostArena(device, limit_bytes=block_count * block_bytes, block_bytes=block_bytes)
    return Tide(pool, arena)


@pytest.mark.parametrize("head_dim", [6, 8, 64])
def test_snapshots_equal_those_of_a_cpu(device: AcceleratorDevice, head_dim: int) -> None:
    """The form doesn't depend on the device: bytes and checksums are equal."""
    geometry = small_geometry(head_dim=head_dim)
    slots = [*range(7), 12, 11, 10, 9]
    snapshots = []
    for source in (device, open_device("cpu")):
        tide = make_tide_on(source, geometry=geometry)
        snapshot = tide.offload(slots)
        blocks = snapshot.lease.blocks
        data = [bytes(block.bytes_view(3 * geometry.token_bytes)) for block in blocks]
        snapshots.append((snapshot.seal, data))
        tide.discard(snapshot)
    assert snapshots[1] == snapshots[0]


def test_damage_is_found_before_anything_is_written(device: AcceleratorDevice) -> None:
    """The host checks all spans before the device is asked to write anything."""
    tide = make_tide_on(device)
    snapshot = tide.offload(range(12))
    before = image_of(tide.pool)
    damage(snapshot)
    with pytest.raises(SnapshotDamaged):
        tide.restore(snapshot, range(8, 20))
    assert same_image(before, image_of(tide.pool))
    tide.discard(snapshot)


def test_staging_is_two_chunks_however_many_there_are(lazy_npu: str) -> None:
    """Only the memory beside the pool is left, so a move may keep only a fixed part of it."""
    device = AcceleratorDevice(lazy_npu)
    tide = make_tide_on(device, block_count=5)
    before = _used_bytes()
    for _ in range(3):
        tide.discard(tide.offload(range(20)))
        # The device's memory is allocated in multiples of 512 bytes.
        assert 2 * 512 == _used_bytes() - before
    device.close()
    assert before == _used_bytes()


def _used_bytes() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def test_at_most_two_chunks_are_in_flight(lazy_npu: str) -> None:
    """A chunk is issued only when the chunk two before it has arrived."""
    device = AcceleratorDevice(lazy_npu)
    memory = device.allocate(64)
    host = [device.allocate_host(64) for _ in range(6)]
    missing: list[list[int]] = []

    def step(number: int) -> Step[int]:
        def issue(staging: torch.Tensor | None) -> None:
            assert staging is not None
            # A copy that hasn't run leaves the device's poison, which isn't zero.
            missing.append([earlier for earlier in range(number) if host[earlier].any()])
            staging.copy_(memory)
            host[number].copy_(staging, non_blocking=True)

        return Step(lambda: int(host[number].any()), issue)

    job = device.submit(lambda: [[step(number) for number in range(6)]], staging_bytes=64)
    assert [0] * 6 == job.wait()
    assert [[], [0], [1], [2], [3], [4]] == missing
    device.close()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("where", ["issue", "finish"])
def test_an_error_of_a_step_is_raised_after_all_copies_have_ended(
    device: AcceleratorDevice, where: str, before: int
) -> None:
    """The error may come on either stream, and the queue goes on."""
    memory, host = device.allocate(64), device.allocate_host(64)

    def copy(_: torch.Tensor | None) -> None:
        host.copy_(memory, non_blocking=True)

    def fail() -> int:
        raise ValueError("of the step")

    def fail_to_issue(_: torch.Tensor | None) -> None:
        fail()

    bad: Step[int] = Step(lambda: 1, fail_to_issue) if where == "issue" else Step(fail, copy)
    idle = [Step(lambda: 9, lambda _: None)] * before
    job = device.submit(lambda: [[*idle, Step(lambda: 0, copy), bad, Step(lambda: 2, copy)]])
    with pytest.raises(ValueError, match="of the step"):
        job.wait()
    assert not host.any(), "what was asked for before has happened"
    assert [5] == submit(device, [lambda: 5]).wait()


def test_after_an_error_no_later_phase_begins(device: AcceleratorDevice) -> None:
    """Otherwise a damaged snapshot would be written."""
    ran: list[int] = []

    def fail() -> int:
        raise ValueError("of the first phase")

    with pytest.raises(ValueError):
        submit(device, [fail], [lambda: ran.append(1)]).wait()
    assert [] == ran


def test_an_error_of_the_device_is_raised_by_its_job(device: AcceleratorDevice) -> None:
    """The wait for the job raises it, and later jobs run."""
    memory, source = device.allocate(4), device.allocate(1)

    def write_outside(_: torch.Tensor | None) -> None:
        memory.index_copy_(0, torch.tensor([9]).to(memory.device), source)

    job = device.submit(lambda: [[Step(lambda: 1, write_outside)]])
    with pytest.raises((RuntimeError, IndexError), match="index"):
        job.wait()
    assert [5] == submit(device, [lambda: 5]).wait()


def test_jobs_of_many_threads_are_all_done(npu: str) -> None:
    """Each thread's writes come before its offload."""
    device = AcceleratorDevice(npu)
    wrong: list[int] = []

    def work(number: int) -> None:
        tide = make_tide_on(device)
        for round_number in range(4):
            scramble(tide.pool, 10 * number + round_number)
            snapshot = tide.offload(range(20))
            before = image_of(tide.pool)
            poison(tide.pool, range(20))
            tide.restore(snapshot, range(20))
            if not same_image(before, image_of(tide.pool)):
                wrong.append(number)
            tide.discard(snapshot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [] == wrong
    device.close()


def test_closing_waits_for_the_queue_and_frees_the_staging(lazy_npu: str) -> None:
    """A second close is harmless."""
    device = AcceleratorDevice(lazy_npu)
    tide = make_tide_on(device)
    ticket = tide.start_offload(range(20))
    device.close()
    assert ticket.done()
    tide.discard(ticket.wait())
    device.close()
    assert [] == device._streams
