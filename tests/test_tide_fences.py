from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.arena import Lease
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, KvtideError, SlotsLost, SnapshotDamaged
from kvtide.seal import Span
from kvtide.tide import Tide
from support.broken_devices import BreakingDevice, FakeDevice, GatedDevice, LateDevice
from support.lazy_device import LazyDevice, LazyJob
from support.pools import (
    fill,
    image_of,
    make_pool,
    poison,
    same_image,
    small_geometry,
    with_rows,
)
from support.tides import BLOCK_BYTES, damage, make_tide

PATIENCE_S = 60.0


def test_an_offload_reads_its_slots_at_the_call() -> None:
    """An engine reuses its index tensors; a later change doesn't matter."""
    tide = make_tide(LazyDevice())
    before = image_of(tide.pool)
    slots = torch.tensor([3, 4, 5])
    ticket = tide.start_offload(slots)
    slots[:] = 9
    snapshot = ticket.wait()
    target = torch.tensor([17, 18, 19])
    restoring = tide.start_restore(snapshot, target)
    target[:] = 0
    restoring.wait()
    expected = with_rows(before, [17, 18, 19], before, [3, 4, 5])
    assert same_image(expected, image_of(tide.pool))
    tide.discard(snapshot)


def test_a_ticket_that_nobody_waited_for_has_moved_nothing() -> None:
    """`start_` returns at once, and `done` doesn't wait."""
    device = LazyDevice()
    tide = make_tide(device)
    snapshot = tide.offload(range(4))
    before = image_of(tide.pool)
    ticket = tide.start_restore(snapshot, range(4, 8))
    assert not ticket.done()
    assert not ticket.settled
    assert 1 == device.queued_count
    assert same_image(before, image_of(tide.pool))
    ticket.wait()
    assert same_image(with_rows(before, range(4, 8), before, range(4)), image_of(tide.pool))
    tide.discard(snapshot)


def test_pages_are_not_released_before_the_offload_has_run() -> None:
    """When `retract` returns, the pages' next holder may write at once."""
    device = LazyDevice()
    tide = make_tide(device)
    assert tide._pages is not None
    pages = tide._pages.acquire(2)
    assert pages is not None
    before = image_of(tide.pool)
    snapshot = tide.retract(pages, 7)
    assert 0 == device.queued_count
    poison(tide.pool, range(20))
    tide.restore(snapshot, range(12, 19))
    poisoned = {part: np.full_like(rows, 0xA5) for part, rows in before.items()}
    slots = tide.pool.slots_of(pages)[:7]
    assert same_image(with_rows(poisoned, range(12, 19), before, slots), image_of(tide.pool))
    tide.discard(snapshot)


def test_moves_keep_their_order() -> None:
    """A restore into slots that an earlier offload reads waits for that offload."""
    tide = make_tide(LazyDevice())
    before = image_of(tide.pool)
    old = tide.offload(range(4))
    reading = tide.start_offload(range(4, 8))
    writing = tide.start_restore(old, range(4, 8))
    writing.wait()
    assert reading.done()
    tide.restore(reading.wait(), range(8, 12))
    expected = with_rows(before, range(8, 12), before, range(4, 8))
    assert same_image(with_rows(expected, range(4, 8), before, range(4)), image_of(tide.pool))
    tide.discard(old)
    tide.discard(reading.wait())


def test_discarding_waits_for_pending_restores() -> None:
    """The restores use the host memory until they end; then another offload may have it."""
    device = LazyDevice()
    tide = make_tide(device, block_count=1)
    before = image_of(tide.pool)
    snapshot = tide.offload(range(4))
    first = tide.start_restore(snapshot, range(8, 12))
    second = tide.start_restore(snapshot, range(12, 16))
    tide.discard(snapshot)
    assert (True, True, 0) == (first.settled, second.settled, device.queued_count)
    other = tide.offload(range(4, 8))
    expected = with_rows(before, range(8, 12), before, range(4))
    assert same_image(with_rows(expected, range(12, 16), before, range(4)), image_of(tide.pool))
    tide.discard(other)


def test_discarding_waits_for_failing_restores_too() -> None:
    """`discard` raises nothing, but the ticket's `wait` does."""
    tide = make_tide(LazyDevice())
    snapshot = tide.offload(range(4))
    damage(snapshot)
    ticket = tide.start_restore(snapshot, range(8, 12))
    tide.discard(snapshot)
    assert 0 == tide.arena.used_bytes
    with pytest.raises(SnapshotDamaged):
        ticket.wait()


def test_a_pending_offload_holds_its_blocks() -> None:
    """The blocks count from the call on, and another offload doesn't get them."""
    tide = make_tide(LazyDevice(), block_count=1)
    ticket = tide.start_offload(range(4))
    assert BLOCK_BYTES == tide.arena.used_bytes
    with pytest.raises(ArenaFull):
        tide.start_offload(range(4, 8))
    tide.discard(ticket.wait())


def test_closing_waits_for_all_moves() -> None:
    """Moves that fail are waited for, too; a second close is harmless."""
    device = LazyDevice()
    tide = make_tide(device)
    snapshot = tide.offload(range(4))
    damage(snapshot)
    reading = tide.start_offload(range(8, 12))
    writing = tide.start_restore(snapshot, range(4, 8))
    tide.close()
    assert (0, True, True) == (device.queued_count, reading.settled, writing.settled)
    tide.close()
    tide.discard(snapshot)
    tide.discard(reading.wait())
    assert 0 == tide.arena.used_bytes


def test_moves_that_have_ended_are_forgotten(device: CPUDevice) -> None:
    """A server doesn't grow with time, though nobody waits for its tickets."""
    tide = make_tide(device)
    snapshot = tide.offload(range(4))
    for _ in range(20):
        tide.start_restore(snapshot, range(4, 8))._job.wait()
    assert len(tide._pending) <= 1
    tide.close()
    assert [] == tide._pending
    tide.discard(snapshot)


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the next wait for a job with KeyboardInterrupt, as Ctrl-C does."""
    wait = LazyJob.wait

    def broken_off(job: LazyJob[Any]) -> Any:
        monkeypatch.setattr(LazyJob, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(LazyJob, "wait", broken_off)


def interrupt_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises KeyboardInterrupt after a job is queued and before its blocks know it."""
    use = Lease.use

    def broken_off(lease: Lease, job: Any) -> None:
        monkeypatch.setattr(Lease, "use", use)
        raise KeyboardInterrupt

    monkeypatch.setattr(Lease, "use", broken_off)


def time_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises an ordinary error from a signal handler while a job is waited for."""
    wait = LazyJob.wait

    def broken_off(job: LazyJob[Any]) -> Any:
        monkeypatch.setattr(LazyJob, "wait", wait)
        raise TimeoutError("of an alarm")

    monkeypatch.setattr(LazyJob, "wait", broken_off)


BREAKS = [
    (interrupt_once, KeyboardInterrupt),
    (interrupt_before_the_wait, KeyboardInterrupt),
    (time_out_once, TimeoutError),
]


@pytest.mark.parametrize(("break_off", "error"), BREAKS)
def test_an_interrupted_offload_keeps_no_memory(
    monkeypatch: pytest.MonkeyPatch, break_off: Any, error: type[BaseException]
) -> None:
    """Nobody will ever fetch its snapshot, so nobody could discard it."""
    device = LazyDevice()
    tide = make_tide(device)
    break_off(monkeypatch)
    with pytest.raises(error):
        tide.offload(range(6))
    tide.close()
    assert (0, 0) == (device.queued_count, tide.arena.used_bytes)


@pytest.mark.parametrize(("break_off", "error"), BREAKS)
def test_an_interrupted_restore_returns_when_nothing_writes(
    monkeypatch: pytest.MonkeyPatch, break_off: Any, error: type[BaseException]
) -> None:
    """The slots' next holder must not be overwritten."""
    device = LazyDevice()
    tide = make_tide(device)
    snapshot = tide.offload(range(6))
    break_off(monkeypatch)
    with pytest.raises(error):
        tide.restore(snapshot, range(6, 12))
    assert 0 == device.queued_count
    tide.discard(snapshot)


# ---- nobody else gets what a pending move uses --------------------------------------------------


def other_tide(tide: Tide) -> Tide:
    """Makes another device's tide on the same arena."""
    case = make_pool("created", small_geometry(), LazyDevice(), 5)
    fill(case, 2)
    return Tide(case.pool, tide.arena)


@pytest.mark.filterwarnings("ignore:lease of:ResourceWarning")
@pytest.mark.parametrize("how", ["released", "snapshot dropped", "ticket dropped", "all dropped"])
def test_a_pending_restore_keeps_its_blocks(how: str) -> None:
    """Between a restore's check and its writes nobody else gets its blocks.

    Otherwise it would write other bytes without an error.
    """
    device = GatedDevice()
    tide = make_tide(device, block_count=2)
    pool, arena, other = tide.pool, tide.arena, other_tide(tide)
    before = image_of(pool)
    snapshot = tide.offload(range(8))
    device.gate.clear()
    device.is_there.clear()
    held: list[Any] = [tide, snapshot, tide.start_restore(snapshot, range(8, 16))]
    if how == "released":
        snapshot.lease.release()
        assert (True, (), 0) == (
            snapshot.lease.released,
            snapshot.lease.blocks,
            snapshot.size_bytes,
        )
    held[:] = {"snapshot dropped": held[::2], "ticket dropped": held[:1]}.get(how, held)
    held[:] = [] if how == "all dropped" else held
    del tide, snapshot
    gc.collect()  # a tide and an unsettled ticket refer to each other
    assert device.is_there.wait(PATIENCE_S)
    with pytest.raises(ArenaFull, match="288 of 288 in use"):
        other.offload(range(8))
    device.gate.set()
    device.close()
    held.clear()
    gc.collect()
    assert same_image(with_rows(before, range(8, 16), before, range(8)), image_of(pool))
    assert 0 == arena.used_bytes
    other.discard(other.offload(range(8)))


@pytest.mark.filterwarnings("ignore:lease of:ResourceWarning")
@pytest.mark.parametrize("how", ["released", "dropped"])
def test_a_pending_offload_keeps_its_blocks(how: str) -> None:
    """Nobody will fetch its snapshot, but it still writes, and must not write into another one."""
    device = GatedDevice()
    tide = make_tide(device, block_count=2)
    arena, other = tide.arena, other_tide(tide)
    device.gate.clear()
    held: list[Any] = [tide, tide.start_offload(range(8))]
    if how == "released":
        next(lease for ref in arena._leased if (lease := ref())).release()
    else:
        held.clear()
    del tide
    gc.collect()
    assert device.is_there.wait(PATIENCE_S)
    with pytest.raises(ArenaFull):
        other.offload(range(8))
    device.gate.set()
    device.close()
    held.clear()
    gc.collect()
    assert 0 == arena.used_bytes
    other.discard(other.offload(range(8)))


# ---- a restore that fails while it writes -------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_restore_that_fails_midway_says_that_its_slots_are_lost(
    step: int, is_started: bool
) -> None:
    """Only this error means that bytes have changed; the snapshot stays whole."""
    device = BreakingDevice(step)
    tide = make_tide(device)
    before = image_of(tide.pool)
    snapshot = tide.offload(range(8))
    move: Callable[[], Any] = lambda: tide.restore(snapshot, range(8, 16))  # noqa: E731
    if is_started:
        move = tide.start_restore(snapshot, range(8, 16)).wait
    for _ in range(2):
        with pytest.raises(SlotsLost, match=r"OSError: the link is down.*recompute") as caught:
            move()
        assert isinstance(caught.value.__cause__, OSError)
    others = [*range(8), *range(16, 20)]
    after = image_of(tide.pool)
    assert all(np.array_equal(rows[others], after[part][others]) for part, rows in before.items())
    device.breaks_at = None
    tide.restore(snapshot, range(8, 16))
    assert same_image(with_rows(before, range(8, 16), before, range(8)), image_of(tide.pool))
    tide.discard(snapshot)
    device.close()


def test_a_restore_that_fails_before_its_writes_loses_nothing() -> None:
    """The device's own error is raised, and no byte has changed."""
    device = FakeDevice()
    tide = make_tide(device)
    snapshot = tide.offload(range(8))
    before = image_of(tide.pool)
    tide.pool.device = LateDevice()
    with pytest.raises(OSError, match="the link is down"):
        tide.restore(snapshot, range(8, 16))
    assert same_image(before, image_of(tide.pool))
    tide.pool.device.close()
    tide.discard(snapshot)
    device.close()


# ---- what is left of a move that failed ---------------------------------------------------------


def raising(error: BaseException) -> Callable[..., Any]:
    """Makes a function that only raises the error."""

    def fail(*_: Any) -> Any:
        raise error

    return fail


@dataclass(eq=False)
class Local:
    """An object in the caller's frame."""

    held: Any = None


def fail_in_a_frame(move: Callable[[Any], Any]) -> weakref.ref[Local]:
    """Makes a move fail in this frame, and returns a reference that ends with the frame."""
    local = Local()
    try:
        local.held = move(local)
        local.held.wait()  # a ticket
    except (KvtideError, KeyboardInterrupt):
        return weakref.ref(local)
    raise AssertionError("the move must fail")


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("how", ["restore", "start_restore", "interrupt", "lost", "miss"])
def test_a_failed_move_keeps_nothing_of_its_caller(
    monkeypatch: pytest.MonkeyPatch, lanes: int, how: str
) -> None:
    """The frame is free at once, before the next job and before a garbage collection."""
    device = BreakingDevice(1) if how == "lost" else CPUDevice(lanes=lanes)
    tide = make_tide(device)
    snapshot = tide.offload(range(8), key="k")
    if how in ("restore", "start_restore"):
        damage(snapshot)
    if how == "miss":
        snapshot.seal = replace(snapshot.seal, spans=snapshot.seal.spans[:-1])
    if how == "interrupt":
        monkeypatch.setattr(Span, "check", raising(KeyboardInterrupt()))
    restore = tide.restore if how in ("restore", "interrupt") else tide.start_restore
    gc.collect()
    gc.disable()
    try:
        frame = fail_in_a_frame(lambda _: restore(snapshot, range(8, 16), key="k"))
        assert frame() is None
    finally:
        gc.enable()
    tide.discard(snapshot)
    device.close()
