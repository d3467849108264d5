"""The fences, on a device that does nothing before somebody waits; each fence is also removed.

Every scenario runs with the code unchanged, in all schedules, and must be exact. Then the code is
broken in one place, and the same scenario must notice: by other bytes, by a checksum, or by a
violation that the simulated device reports.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import simnpu
import torch

from kvtide.arena import HostArena, Lease
from kvtide.device import AcceleratorDevice, Block
from kvtide.device import accelerator as accelerator_module
from kvtide.errors import ArenaFull, KvtideError
from kvtide.pool import PageAllocator, Pool
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.transfer.run import Task
from support.pools import chunk_bytes, image_of, same_image, scramble, small_geometry, with_rows
from support.simulated import SCHEDULES, lazy_accelerator, simulated

Break = Callable[[pytest.MonkeyPatch], None]
SOURCE, TARGET = [0, 1, 2, 3, 9, 8, 7, 6, 15], [19, 10, 11, 12, 13, 4, 5, 14, 18]


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> str:
    """Runs the test in each schedule."""
    name: str = request.param
    return name


def make_tide(device: AcceleratorDevice) -> Tide:
    """Makes a tide of five pages of 4 tokens, and an arena of 8 blocks of one page."""
    geometry = small_geometry()
    pool = Pool.create(geometry, device, page_count=5)
    scramble(pool, 1)
    block_bytes = 4 * geometry.token_bytes
    arena = HostArena(device, limit_bytes=8 * block_bytes, block_bytes=block_bytes)
    return Tide(pool, arena, PageAllocator(5))


def write_later(pool: Pool, slots: list[int], value: int) -> None:
    """Queues a write on the device, like a model's step, which runs some time later."""
    index = torch.tensor(slots).to(pool.device.torch_device)
    for name in ("k", "v"):
        for layer in range(2):
            pool.plane(name, layer).view(torch.uint8).index_fill_(0, index, value)


# ---- the scenarios: each returns whether every byte is as it must be ---------------------------


def saves_what_was_just_written(device: AcceleratorDevice) -> bool:
    """An offload waits for earlier writes to its slots."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    write_later(tide.pool, SOURCE, 7)
    snapshot = tide.offload(SOURCE)
    tide.restore(snapshot, TARGET)
    sevens = {part: np.full_like(rows, 7) for part, rows in before.items()}
    expected = with_rows(before, SOURCE, sevens, SOURCE)
    expected = with_rows(expected, TARGET, sevens, SOURCE)
    tide.discard(snapshot)
    return same_image(expected, image_of(tide.pool))


def saves_before_the_slots_are_reused(device: AcceleratorDevice) -> bool:
    """Slots that are still read are not handed out again before the ticket is done."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    books = tide._books
    pages = books.acquire(3)
    assert pages is not None
    release = books.release

    def release_and_overwrite(pages: Iterable[int]) -> None:
        given = list(pages)
        release(given)
        write_later(tide.pool, tide.pool.slots_of(given).tolist(), 7)
        torch.accelerator.synchronize()

    books.release = release_and_overwrite  # type: ignore[method-assign]
    snapshot = tide.retract(pages, 10)
    source = tide.pool.slots_of(pages)
    tide.restore(snapshot, range(2, 12))
    sevens = {part: np.full_like(rows, 7) for part, rows in before.items()}
    expected = with_rows(before, source, sevens, source)
    expected = with_rows(expected, range(2, 12), before, source[:10])
    tide.discard(snapshot)
    return same_image(expected, image_of(tide.pool))


def restores_after_earlier_readers(device: AcceleratorDevice) -> bool:
    """Reads that were queued before a restore see the old bytes."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    snapshot = tide.offload(SOURCE)
    index = torch.tensor(TARGET).to(device.torch_device)
    reading = tide.pool.plane("k", 1)[index]
    tide.restore(snapshot, TARGET)
    torch.accelerator.synchronize()
    seen = reading.cpu().view(torch.uint8).numpy().reshape(len(TARGET), -1)
    expected = with_rows(before, TARGET, before, SOURCE)
    tide.discard(snapshot)
    return np.array_equal(before["k", 1][TARGET], seen) and same_image(
        expected, image_of(tide.pool)
    )


def keeps_host_memory_until_it_was_read(device: AcceleratorDevice) -> bool:
    """Nobody else may write to a restore's host memory before the restore has ended."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    snapshot = tide.offload(SOURCE)
    blocks = snapshot.lease.blocks
    restoring = tide.start_restore(snapshot, TARGET)
    tide.discard(snapshot)
    for block in blocks:
        block.bytes_view(4 * tide.pool.geometry.token_bytes)[:] = bytes(144)
    restoring.wait()
    torch.accelerator.synchronize()
    return same_image(with_rows(before, TARGET, before, SOURCE), image_of(tide.pool))


def keeps_host_memory_until_it_was_written(device: AcceleratorDevice) -> bool:
    """The bytes of an offload have arrived when its ticket is done; then memory may be freed."""
    tide = make_tide(device)
    snapshot = tide.offload(SOURCE)
    before = image_of(tide.pool)
    saved = snapshot.lease.blocks[0].bytes_view(4 * tide.pool.geometry.token_bytes).tobytes()
    tide.discard(snapshot)
    tide.arena._free.clear()  # gives the slab back to the system
    torch.accelerator.synchronize()
    return chunk_bytes(before, SOURCE[:4]) == saved


def takes_slots_at_the_call(device: AcceleratorDevice) -> bool:
    """Engines reuse their index tensors at once."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    source, target = np.array(SOURCE), np.array(TARGET)
    offloading = tide.start_offload(source)
    source[:] = source[::-1].copy()
    snapshot = offloading.wait()
    restoring = tide.start_restore(snapshot, target)
    target[:] = np.roll(target, 1)
    restoring.wait()
    tide.discard(snapshot)
    return same_image(with_rows(before, TARGET, before, SOURCE), image_of(tide.pool))


def keeps_snapshots_apart(device: AcceleratorDevice) -> bool:
    """Two pending offloads share no host memory."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    tickets = [tide.start_offload(range(6)), tide.start_offload(range(6, 12))]
    first, second = (ticket.wait() for ticket in tickets)
    tide.restore(second, range(12, 18))
    tide.restore(first, range(6, 12))
    tide.discard(first)
    tide.discard(second)
    expected = with_rows(before, range(12, 18), before, range(6, 12))
    expected = with_rows(expected, range(6, 12), before, range(6))
    return same_image(expected, image_of(tide.pool))


def keeps_host_memory_from_another_device(device: AcceleratorDevice) -> bool:
    """Between a restore's check and its writes another device may offload to the same arena."""
    tide, other_device = make_tide(device), AcceleratorDevice("npu:1")
    pool = Pool.create(small_geometry(), other_device, page_count=5)
    scramble(pool, 2)
    other, given = Tide(pool, tide.arena), list[Snapshot]()
    before, submit = image_of(tide.pool), device.submit
    snapshot, rest = tide.offload(SOURCE), tide.arena.lease(5)

    def submit_and_meddle(phases: Any, **options: Any) -> Any:
        def meddling() -> Iterable[Any]:
            for number, phase in enumerate(phases()):
                if number == 1:
                    snapshot.lease.release()
                    with suppress(ArenaFull):
                        given.append(other.offload(range(9)))
                yield phase

        return submit(meddling, **options)

    device.submit = submit_and_meddle  # type: ignore[method-assign]
    tide.start_restore(snapshot, TARGET).wait()
    rest.release()
    given.append(other.offload(range(9)))
    for kept in given:
        other.discard(kept)
    other_device.close()
    return same_image(with_rows(before, TARGET, before, SOURCE), image_of(tide.pool))


SCENARIOS: list[Callable[[AcceleratorDevice], bool]] = [
    saves_what_was_just_written,
    saves_before_the_slots_are_reused,
    restores_after_earlier_readers,
    keeps_host_memory_until_it_was_read,
    keeps_host_memory_until_it_was_written,
    takes_slots_at_the_call,
    keeps_snapshots_apart,
    keeps_host_memory_from_another_device,
]


# ---- the breaks: each takes one fence away ----------------------------------------------------


class _NoEvent:
    """An event that doesn't wait."""

    def synchronize(self) -> None:
        """Returns without waiting."""


def no_synchronise(patch: pytest.MonkeyPatch) -> None:
    """The mover's jobs end when all copies are queued, not when they have run."""
    issue = accelerator_module.CopyStream.issue

    def issue_alone(copy_stream: Any, step: Any) -> Any:
        issue(copy_stream, step)
        return _NoEvent()

    patch.setattr(accelerator_module.CopyStream, "issue", issue_alone)
    patch.setattr(AcceleratorDevice, "_settled", lambda self: nullcontext())


def no_event(patch: pytest.MonkeyPatch) -> None:
    """A chunk is hashed before it has arrived; the job as a whole still waits."""
    issue = accelerator_module.CopyStream.issue

    def issue_alone(copy_stream: Any, step: Any) -> Any:
        issue(copy_stream, step)
        return _NoEvent()

    patch.setattr(accelerator_module.CopyStream, "issue", issue_alone)


def wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Jobs wait for a stream, but not for the stream on which the caller computes."""
    patch.setattr(
        torch.accelerator, "current_stream", lambda device=None: torch.Stream(device="npu")
    )


def pages_freed_early(patch: pytest.MonkeyPatch) -> None:
    """`retract` releases the pages when the offload is queued."""

    def retract(tide: Tide, pages: Any, token_count: int, *, key: str = "") -> Snapshot:
        ticket = tide.start_offload(tide.pool.slots_of(pages)[:token_count], key=key)
        tide._books.release(pages)
        return ticket.wait()

    patch.setattr(Tide, "retract", retract)


def copy_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """The mover issues its copies on another stream than the one that is waited for."""
    gather = Task.gather

    def gather_elsewhere(task: Task, staging: torch.Tensor | None) -> None:
        with torch.Stream(device="npu"):
            gather(task, staging)

    patch.setattr(Task, "gather", gather_elsewhere)


def blocks_leased_twice(patch: pytest.MonkeyPatch) -> None:
    """The arena hands out blocks that are already leased."""
    move = HostArena._move_to

    def move_and_keep(arena: HostArena, blocks: list[Block], count: int) -> None:
        move(arena, blocks, count)
        arena._free.extend(reversed(blocks))

    patch.setattr(HostArena, "_move_to", move_and_keep)
    patch.setattr(Lease, "release", lambda lease: lease._blocks.clear())


def lease_freed_early(patch: pytest.MonkeyPatch) -> None:
    """`discard` returns the blocks to the arena while others read them."""
    patch.setattr(Tide, "discard", lambda tide, snapshot: snapshot.lease.release())


def lease_without_users(patch: pytest.MonkeyPatch) -> None:
    """A lease doesn't know which moves use its blocks."""
    patch.setattr(Lease, "in_use", False)


def slots_by_reference(patch: pytest.MonkeyPatch) -> None:
    """The caller's array is kept, not a copy of it."""
    patch.setattr(Pool, "checked", lambda _, slots: np.asarray(slots))


def index_uploaded_later(patch: pytest.MonkeyPatch) -> None:
    """The index is uploaded by a copy that nobody waits for, from memory that is soon reused."""

    def upload(device: AcceleratorDevice, index: torch.Tensor) -> torch.Tensor:
        host = index.clone()
        uploaded = host.to(device.torch_device, non_blocking=True)
        host.fill_(0)
        return uploaded

    patch.setattr(AcceleratorDevice, "upload", upload)


BROKEN: list[tuple[Callable[[AcceleratorDevice], bool], Break]] = [
    (saves_what_was_just_written, no_synchronise),
    (saves_what_was_just_written, no_event),
    (saves_what_was_just_written, wrong_stream),
    (saves_what_was_just_written, copy_on_another_stream),
    (keeps_snapshots_apart, blocks_leased_twice),
    (saves_before_the_slots_are_reused, pages_freed_early),
    (restores_after_earlier_readers, wrong_stream),
    (keeps_host_memory_until_it_was_read, lease_freed_early),
    (keeps_host_memory_until_it_was_read, no_synchronise),
    (keeps_host_memory_until_it_was_written, no_synchronise),
    (keeps_host_memory_from_another_device, lease_without_users),
    (takes_slots_at_the_call, slots_by_reference),
    (takes_slots_at_the_call, index_uploaded_later),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy-queue", "threads"])
def test_every_fence_holds(
    scenario: Callable[[AcceleratorDevice], bool], schedule: str, lazy: bool
) -> None:
    """Every fence holds in every schedule, with jobs as late as possible and in threads."""
    with simulated(schedule) as name:
        device = lazy_accelerator(name) if lazy else AcceleratorDevice(name)
        assert scenario(device)
        device.close()


@pytest.mark.parametrize(
    ("scenario", "fault"), BROKEN, ids=lambda function: getattr(function, "__name__", None)
)
def test_every_missing_fence_is_noticed(
    scenario: Callable[[AcceleratorDevice], bool], fault: Break
) -> None:
    """Bytes, a checksum or the simulated device show it: nothing is lost silently."""
    assert caught(scenario, fault)


def caught(scenario: Callable[[AcceleratorDevice], bool], fault: Break) -> bool:
    """Returns whether the scenario notices the fault."""
    with simulated("lazy") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a broken run leaves its snapshot
        exact = _is_exact(scenario, fault, lazy_accelerator(name))
        simnpu.reset()  # runs what is pending, and drops its violations
        gc.collect()
        return not exact


def _is_exact(
    scenario: Callable[[AcceleratorDevice], bool], fault: Break, device: AcceleratorDevice
) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            exact = scenario(device)
            torch.accelerator.synchronize()
        except (KvtideError, RuntimeError):
            return False
        return exact
