"""Ctrl-C at every instruction of kvtide: afterwards nothing is held that nobody knows of.

Free and held pages together are all pages, and a request is whole on the device or in its snapshot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtide.arena import HostArena
from kvtide.device import AcceleratorDevice, CPUDevice, Device
from kvtide.errors import SlotError, SlotsLost
from kvtide.pool import PageAllocator, Pool
from kvtide.snapshot import Snapshot
from kvtide.ticket import Ticket
from kvtide.tide import Tide
from support.broken_devices import BreakingDevice, LateDevice
from support.interrupts import every_interrupt
from support.lazy_device import LazyDevice, LazyJob
from support.pools import Image, image_of, same_image, scramble, small_geometry, with_rows
from support.simulated import simulated
from support.tides import BLOCK_BYTES, acquire, books

USED = 2 * BLOCK_BYTES


@pytest.fixture(params=["lazy", "lanes"])
def idle_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose jobs run where somebody waits for them, and one that runs them in lanes."""
    device: Device = LazyDevice() if request.param == "lazy" else CPUDevice(lanes=2)
    yield device
    device.close()


@dataclass
class Case:
    """A tide with a request of seven tokens in two pages, and the results of its moves."""

    tide: Tide
    pages: list[int]
    before: Image
    given: list[Any] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        """Retracts the request, and returns its snapshot."""
        return self.tide.retract(self.pages, 7, key="r")

    def resumes(self, snapshot: Snapshot) -> bool:
        """Returns whether the request comes back byte for byte, with nothing held afterwards."""
        pages = self.tide.resume(snapshot, 2, key="r")
        assert pages is not None
        target, source = (self.tide.pool.slots_of(p)[:7] for p in (pages, self.pages))
        is_same = same_image(
            with_rows(image_of(self.tide.pool), target, self.before, source),
            image_of(self.tide.pool),
        )
        self.tide._books.release(pages)
        return is_same and books(self.tide) == (5, 0, 0)


def make_case(device: Device) -> Case:
    """Makes a case on an idle device."""
    pool = Pool.create(small_geometry(), device, page_count=5)
    scramble(pool, 1)
    arena = HostArena(device, limit_bytes=8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    tide = Tide(pool, arena, PageAllocator(5))
    pages = acquire(tide, 2)
    return Case(tide, pages, image_of(tide.pool))


def test_retract_is_whole_wherever_an_interrupt_comes(idle_device: Device) -> None:
    """The request keeps its pages and the arena holds nothing; the next retract succeeds."""

    def make() -> tuple[Case, Callable[[], Any]]:
        case = make_case(idle_device)
        return case, lambda: case.given.append(case.snapshot())

    for where, case, raised in every_interrupt(make):
        if raised:
            assert (3, 2, 0) == books(case.tide), where
            assert same_image(case.before, image_of(case.tide.pool)), where
        snapshot = case.snapshot() if raised else case.given[0]
        assert (5, 0, USED) == books(case.tide), where
        assert case.resumes(snapshot), where


def test_resume_is_whole_wherever_an_interrupt_comes(idle_device: Device) -> None:
    """No page is held, and the snapshot can be resumed."""

    def make() -> tuple[tuple[Case, Snapshot], Callable[[], Any]]:
        case = make_case(idle_device)
        snapshot = case.snapshot()
        return (case, snapshot), lambda: case.given.append(case.tide.resume(snapshot, 2, key="r"))

    for where, (case, snapshot), raised in every_interrupt(make):
        if raised:
            assert (5, 0, USED) == books(case.tide), where
            assert case.resumes(snapshot), where
        else:
            case.tide._books.release(case.given[0])
            assert (5, 0, 0) == books(case.tide), where


def test_a_resume_that_fails_is_undone_wherever_an_interrupt_comes() -> None:
    """Ctrl-C may also come while the device's error is raised and the resume is undone."""
    device = BreakingDevice()

    def make() -> tuple[tuple[Case, Snapshot], Callable[[], Any]]:
        device.breaks_at = None
        case = make_case(device)
        snapshot = case.snapshot()
        device.breaks_at = 0

        def resume() -> None:
            with pytest.raises(SlotsLost):
                case.tide.resume(snapshot, 2, key="r")

        return (case, snapshot), resume

    for where, (case, snapshot), _ in every_interrupt(make):
        device.breaks_at = None
        assert (5, 0, USED) == books(case.tide), where
        assert case.resumes(snapshot), where
    device.close()


def test_an_offload_keeps_nothing_wherever_an_interrupt_comes(idle_device: Device) -> None:
    """This holds for `offload` and `start_offload`: nobody has the snapshot or the ticket."""
    for is_started in (False, True):

        def make(is_started: bool = is_started) -> tuple[Case, Callable[[], Any]]:
            case = make_case(idle_device)
            offload = case.tide.start_offload if is_started else case.tide.offload
            return case, lambda: case.given.append(offload(range(7)))

        for where, case, raised in every_interrupt(make):
            if not raised:
                given = case.given[0]
                case.tide.discard(given.wait() if isinstance(given, Ticket) else given)
            assert 0 == case.tide.arena.used_bytes, where
            if isinstance(idle_device, LazyDevice):
                assert 0 == idle_device.queued_count, where


def test_a_restore_leaves_the_snapshot_whole_wherever_an_interrupt_comes(
    idle_device: Device,
) -> None:
    """This holds for `restore` and `start_restore`: nothing writes any more to the slots."""
    for is_started in (False, True):

        def make(
            is_started: bool = is_started,
        ) -> tuple[tuple[Case, Snapshot], Callable[[], Any]]:
            case = make_case(idle_device)
            snapshot = case.snapshot()
            restore = case.tide.start_restore if is_started else case.tide.restore
            move = lambda: case.given.append(restore(snapshot, range(8, 15), key="r"))  # noqa: E731
            return (case, snapshot), move

        for where, (case, snapshot), raised in every_interrupt(make):
            if is_started and not raised:
                case.given[0].wait()
            if isinstance(idle_device, LazyDevice):
                assert 0 == idle_device.queued_count, where
            assert not snapshot.lease.in_use, where
            assert case.resumes(snapshot), where


def test_a_ticket_can_be_waited_for_again_wherever_an_interrupt_comes(device: CPUDevice) -> None:
    """Ctrl-C ends the wait but not the move; `discard` may be repeated, too."""

    def make() -> tuple[tuple[Case, Ticket[Snapshot]], Callable[[], Any]]:
        case = make_case(device)
        ticket = case.tide.start_offload(range(7), key="r")
        return (case, ticket), lambda: case.tide.discard(ticket.wait())

    for where, (case, ticket), _ in every_interrupt(make):
        case.tide.discard(ticket.wait())
        assert 0 == case.tide.arena.used_bytes, where
        assert all(ticket.settled for ticket in case.tide._pending), where


def test_close_may_be_repeated_wherever_an_interrupt_comes(device: CPUDevice) -> None:
    """A repeated close settles all moves."""

    def make() -> tuple[Case, Callable[[], Any]]:
        case = make_case(device)
        snapshot = case.snapshot()
        case.given += [case.tide.start_offload(range(4)), snapshot]
        case.tide.start_restore(snapshot, range(8, 15), key="r")
        return case, case.tide.close

    for where, case, _ in every_interrupt(make):
        case.tide.close()
        assert case.given[0].settled, where
        case.tide.discard(case.given[0].wait())
        case.tide.discard(case.given[1])
        assert 0 == case.tide.arena.used_bytes, where


@pytest.mark.parametrize("name", ["lazy", "thread"])
def test_moves_of_an_accelerator_hold_nothing_wherever_an_interrupt_comes(name: str) -> None:
    """The jobs run in another thread, so Ctrl-C ends only the wait here.

    kvtide still waits for them, since a move must end before its pages are free.
    """
    with simulated(name) as npu:
        device = AcceleratorDevice(npu)

        def make() -> tuple[Case, Callable[[], Any]]:
            case = make_case(device)
            return case, lambda: case.given.append(case.snapshot())

        for where, case, raised in every_interrupt(make):
            expected = (3, 2, 0) if raised else (5, 0, USED)
            assert expected == books(case.tide), where
            if not raised:
                case.tide.discard(case.given[0])
        device.close()


# ---- the arena and the allocator alone ---------------------------------------------------------


def test_the_arena_loses_no_block_wherever_an_interrupt_comes() -> None:
    """No block is lost while it leases, grows, takes back, or finds a forgotten lease."""

    def lease_and_release(arena: HostArena) -> Any:
        first = arena.lease(3)
        second = arena.lease(2)
        first.release()
        second.release()
        return arena.lease(0)

    def forget(arena: HostArena) -> Any:
        arena.lease(3)
        return arena.lease(5).release()

    for use in (lease_and_release, forget):

        def make(use: Callable[[HostArena], Any] = use) -> tuple[HostArena, Callable[[], Any]]:
            arena = HostArena(LazyDevice(), limit_bytes=8 * 64, block_bytes=64)
            return arena, lambda: use(arena)

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ResourceWarning
            )  # an interrupted `use` forgets its lease
            for where, arena, _ in every_interrupt(make):
                assert 0 == arena.used_bytes, where
                lease = arena.lease(8)
                assert 8 == len({block.offset for block in lease.blocks}), where
                lease.release()
                assert (0, 8 * 64) == (arena.used_bytes, arena.reserved_bytes), where


def test_a_release_may_be_repeated_wherever_an_interrupt_comes() -> None:
    """A repeated release gives every block back once."""

    def make() -> tuple[tuple[HostArena, Any], Callable[[], Any]]:
        arena = HostArena(LazyDevice(), limit_bytes=8 * 64, block_bytes=64)
        lease = arena.lease(5)
        return (arena, lease), lease.release

    for where, (arena, lease), _ in every_interrupt(make):
        lease.release()
        assert 0 == arena.used_bytes, where
        assert 8 == len(set(arena._free)), where


def test_the_allocator_loses_no_page_wherever_an_interrupt_comes() -> None:
    """Either all pages are acquired or released, or none; the caller's list shows which."""

    def acquiring() -> tuple[PageAllocator, Callable[[], Any]]:
        allocator = PageAllocator(5)
        return allocator, lambda: allocator.acquire(3)

    for where, allocator, raised in every_interrupt(acquiring):
        if raised:
            assert (5, 0) == (allocator.free_count, allocator.held_count), where

    def releasing() -> tuple[PageAllocator, Callable[[], Any]]:
        allocator = PageAllocator(5)
        pages = allocator.acquire(3)
        return allocator, lambda: allocator.release(pages or ())

    for where, allocator, _ in every_interrupt(releasing):
        assert allocator.held_count in (0, 3), where
        if allocator.held_count:
            allocator.release([0, 1, 2])
        with pytest.raises(SlotError, match="isn't held"):
            allocator.release([0])
        assert 5 == len(set(allocator.acquire(5) or ())), where


@pytest.mark.parametrize("is_back", [False, True])
def test_a_second_interrupt_ends_no_wait_for_a_move(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """People press Ctrl-C again if it takes long; pages must not be free before the move ends."""
    device = LazyDevice()
    case = make_case(device)
    snapshot = case.snapshot() if is_back else None
    track, wait, presses = case.tide._track, LazyJob.wait, iter(range(3))

    def press(ticket: Ticket[Any]) -> Any:
        track(ticket)
        raise KeyboardInterrupt

    def press_again(job: LazyJob[Any]) -> Any:
        if next(presses, None) is not None:
            raise KeyboardInterrupt
        return wait(job)

    monkeypatch.setattr(case.tide, "_track", press)
    monkeypatch.setattr(LazyJob, "wait", press_again)
    with pytest.raises(KeyboardInterrupt):
        case.tide.resume(snapshot, 2, key="r") if snapshot else case.snapshot()
    assert 0 == device.queued_count
    expected = (5, 0, USED) if is_back else (3, 2, 0)
    assert expected == books(case.tide)
    if snapshot is not None:
        case.tide.discard(snapshot)
    case.tide.close()


def test_a_failed_ticket_gives_back_what_it_held_wherever_an_interrupt_comes() -> None:
    """A later wait raises the same error, and no block is leased."""
    device = LateDevice()

    def make() -> tuple[tuple[Case, Ticket[Snapshot]], Callable[[], Any]]:
        case = make_case(device)
        ticket = case.tide.start_offload(range(7))

        def ask() -> None:
            with pytest.raises(OSError, match="link is down"):
                ticket.wait()

        return (case, ticket), ask

    for where, (case, ticket), _ in every_interrupt(make):
        with pytest.raises(OSError, match="link is down"):
            ticket.wait()
        assert 0 == case.tide.arena.used_bytes, where
    device.close()
