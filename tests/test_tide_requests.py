from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.device import CPUDevice, Device
from kvtide.errors import (
    ArenaFull,
    LayoutError,
    SlotError,
    SlotsLost,
    SnapshotDamaged,
    SnapshotMiss,
)
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from support.broken_devices import BreakingDevice
from support.lazy_device import LazyDevice
from support.pools import (
    Image,
    image_of,
    poison,
    rows_of,
    same_image,
    with_rows,
)
from support.tides import BLOCK_BYTES, acquire, books, damage, make_tide
from support.values import NO_ROWS, ONES, name_of


@pytest.mark.parametrize("token_count", [0, 1, 3, 4, 5, 7, 8])
def test_a_request_resumes_in_other_pages(device: CPUDevice, token_count: int) -> None:
    """All its tokens come back, also those of a partial page; the counts show who holds what."""
    tide = make_tide(device)
    before = image_of(tide.pool)
    acquire(tide, 1)
    pages = acquire(tide, 2)
    snapshot = tide.retract(pages, token_count, key="r")
    blocks = -(-token_count // 4)
    assert (4, 1, blocks * BLOCK_BYTES) == books(tide)
    held = acquire(tide, 1)
    poison(tide.pool, tide.pool.slots_of([*pages, *held]))
    poisoned = image_of(tide.pool)
    resumed = tide.resume(snapshot, 2, key="r")
    assert resumed is not None
    assert (1, 4, 0) == books(tide)
    target, source = (tide.pool.slots_of(p)[:token_count] for p in (resumed, pages))
    assert same_image(with_rows(poisoned, target, before, source), image_of(tide.pool))


def test_slots_follow_the_order_of_pages() -> None:
    """Page p has the slots from p * page_size on."""
    tide = make_tide(LazyDevice())
    assert [12, 13, 14, 15, 0, 1, 2, 3] == tide.pool.slots_of([3, 0]).tolist()
    assert ([], "int64") == (tide.pool.slots_of([]).tolist(), tide.pool.slots_of([]).dtype.name)


def test_a_full_arena_leaves_a_request_its_pages(device: CPUDevice) -> None:
    """Nothing is released, leased or changed: the caller may recompute, or wait."""
    tide = make_tide(device, block_count=1)
    pages = acquire(tide, 2)
    before = image_of(tide.pool)
    with pytest.raises(ArenaFull):
        tide.retract(pages, 8)
    assert (3, 2, 0) == books(tide)
    assert same_image(before, image_of(tide.pool))
    tide.discard(tide.retract(pages, 4))
    assert (5, 0, 0) == books(tide)


@pytest.mark.parametrize("token_count", [-1, 9])
def test_more_tokens_than_the_pages_hold_are_refused(device: CPUDevice, token_count: int) -> None:
    """A shorter snapshot would lose tokens silently."""
    tide = make_tide(device)
    pages = acquire(tide, 2)
    with pytest.raises(SlotError, match=f"{token_count} tokens to retract, but 2 pages of 4"):
        tide.retract(pages, token_count)
    assert (3, 2, 0) == books(tide)


@pytest.mark.parametrize("pages", [[0, 3], [0, 0], [0, 5], [0, -1]])
def test_retracting_pages_that_are_not_held_changes_nothing(
    device: CPUDevice, pages: list[int]
) -> None:
    """Free, repeated or unknown pages: no page is released, and nothing is leased."""
    tide = make_tide(device)
    acquire(tide, 2)
    with pytest.raises(SlotError):
        tide.retract(pages, 8)
    assert (3, 2, 0) == books(tide)


def test_resume_returns_none_if_too_few_pages_are_free(device: CPUDevice) -> None:
    """The snapshot stays, and resumes when there are enough pages."""
    tide = make_tide(device)
    pages = acquire(tide, 2)
    snapshot = tide.retract(pages, 6)
    others = acquire(tide, 4)
    before, state = image_of(tide.pool), books(tide)
    assert tide.resume(snapshot, 2) is None
    assert state == books(tide)
    assert same_image(before, image_of(tide.pool))
    tide._books.release(others)
    assert tide.resume(snapshot, 2) is not None
    assert (3, 2, 0) == books(tide)


def test_a_resume_of_a_damaged_snapshot_releases_the_pages(device: CPUDevice) -> None:
    """Nothing is written, and the caller can still discard the snapshot."""
    tide = make_tide(device)
    snapshot = tide.retract(acquire(tide, 2), 6)
    damage(snapshot)
    before = image_of(tide.pool)
    with pytest.raises(SnapshotDamaged):
        tide.resume(snapshot, 2)
    assert (5, 0, 2 * BLOCK_BYTES) == books(tide)
    assert same_image(before, image_of(tide.pool))
    tide.discard(snapshot)
    assert (5, 0, 0) == books(tide)


def test_slots_lost_in_a_resume_are_released() -> None:
    """Nobody gets pages with undefined bytes as KV; the snapshot is whole."""
    device = BreakingDevice()
    tide = make_tide(device)
    before = image_of(tide.pool)
    pages = acquire(tide, 2)
    snapshot = tide.retract(pages, 7)
    device.breaks_at = 1
    for _ in range(2):
        with pytest.raises(SlotsLost):
            tide.resume(snapshot, 2)
        assert (5, 0, 2 * BLOCK_BYTES) == books(tide)
    device.breaks_at = None
    resumed = tide.resume(snapshot, 2)
    assert resumed is not None
    after, slots = image_of(tide.pool), tide.pool.slots_of(resumed)[:7]
    assert all(
        np.array_equal(rows[tide.pool.slots_of(pages)[:7]], after[part][slots])
        for part, rows in before.items()
    )
    device.close()


def test_a_resume_that_misses_releases_the_pages(device: CPUDevice) -> None:
    """The key is another request's, so nothing is written into the pages."""
    tide = make_tide(device)
    snapshot = tide.retract(acquire(tide, 2), 6, key="r")
    with pytest.raises(SnapshotMiss):
        tide.resume(snapshot, 2, key="other")
    assert (5, 0, 2 * BLOCK_BYTES) == books(tide)
    tide.discard(snapshot)


def test_too_few_pages_are_refused(device: CPUDevice) -> None:
    """The caller asked for fewer pages than the snapshot needs; none was taken."""
    tide = make_tide(device)
    snapshot = tide.retract(acquire(tide, 2), 6)
    with pytest.raises(SlotError, match="can't hold a snapshot of 6"):
        tide.resume(snapshot, 1)
    assert (5, 0, 2 * BLOCK_BYTES) == books(tide)
    tide.discard(snapshot)


def test_an_interrupted_resume_releases_no_page_that_is_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C ends the wait, not the copy, so the pages aren't free before the copy ends."""
    device = LazyDevice()
    tide = make_tide(device)
    snapshot = tide.retract(acquire(tide, 2), 6)

    def interrupted(*_: Any, **__: Any) -> None:
        tide.start_restore(snapshot, range(6))
        raise KeyboardInterrupt

    monkeypatch.setattr(Tide, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tide.resume(snapshot, 2)
    assert 0 == device.queued_count
    assert (5, 0, 2 * BLOCK_BYTES) == books(tide)
    tide.discard(snapshot)


def test_without_an_allocator_nothing_is_retracted(device: CPUDevice) -> None:
    """The message says how to give an allocator, and nothing is leased."""
    tide = make_tide(device)
    bare = Tide(tide.pool, tide.arena)
    snapshot = bare.offload([1])
    with pytest.raises(LayoutError, match="need a page allocator"):
        bare.retract([0], 4)
    with pytest.raises(LayoutError, match="need a page allocator"):
        bare.resume(snapshot, 1)
    bare.discard(snapshot)
    assert 0 == bare.arena.used_bytes


@dataclass(eq=False)
class Held:
    """A request with pages or with a snapshot, and the bytes that its tokens must have."""

    token_count: int
    rows: Image
    pages: list[int] | None = None
    snapshot: Snapshot | None = None

    @property
    def page_count(self) -> int:
        """How many pages its tokens need."""
        return -(-self.token_count // 4)


class TideMachine(RuleBasedStateMachine):
    """Requests come, are retracted, resume and are aborted, in any order."""

    @initialize(block_count=st.integers(0, 6), lazy=st.booleans())
    def start(self, block_count: int, lazy: bool) -> None:
        """Makes six pages, and less host memory than they hold, or none."""
        self.device: Device = LazyDevice() if lazy else CPUDevice(lanes=2)
        self.tide = make_tide(self.device, block_count=block_count, page_count=6)
        self.requests: list[Held] = []
        self.seed = 0

    def slots(self, request: Held) -> Any:
        """Returns the slots of the request's tokens."""
        assert request.pages is not None
        return self.tide.pool.slots_of(request.pages)[: request.token_count]

    def free(self, pages: list[int]) -> None:
        """Poisons pages that nobody holds now."""
        poison(self.tide.pool, self.tide.pool.slots_of(pages))

    @rule(token_count=st.integers(0, 13))
    def admit(self, token_count: int) -> None:
        """Adds a request whose tokens are random bytes, if there are pages."""
        pages = self.tide._books.acquire(-(-token_count // 4))
        if pages is None:
            return
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        request = Held(token_count, {}, pages)
        for part in image_of(self.tide.pool):
            rows = rows_of(self.tide.pool, *part)
            width = rows.shape[1]
            request.rows[part] = rng.integers(0, 256, (token_count, width), np.uint8)
            rows[self.slots(request)] = request.rows[part]
        self.requests.append(request)

    def draw(self, data: st.DataObject, *, running: bool) -> Held | None:
        """Draws a request that runs, or one that doesn't."""
        some = [request for request in self.requests if running == (request.pages is not None)]
        return some[data.draw(st.integers(0, len(some) - 1))] if some else None

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """The request's pages are free at once; if the arena has no room, it keeps them."""
        request = self.draw(data, running=True)
        if request is None or request.pages is None:
            return
        room = self.tide.arena.limit_bytes - self.tide.arena.used_bytes
        pages = request.pages
        try:
            request.snapshot = self.tide.retract(pages, request.token_count)
        except ArenaFull:
            assert request.page_count * BLOCK_BYTES > room
            return
        request.pages = None
        self.free(pages)

    @rule(data=st.data(), damaged=st.booleans())
    def resume(self, data: st.DataObject, damaged: bool) -> None:
        """The request gets any free pages; if its snapshot is damaged, it is aborted."""
        request = self.draw(data, running=False)
        if request is None or request.snapshot is None:
            return
        fits = request.page_count <= self.tide._books.free_count
        if damaged and fits and request.token_count:
            damage(request.snapshot)
            with pytest.raises(SnapshotDamaged):
                self.tide.resume(request.snapshot, request.page_count)
            self.tide.discard(request.snapshot)
            self.requests.remove(request)
            return
        request.pages = self.tide.resume(request.snapshot, request.page_count)
        assert fits == (request.pages is not None)
        if fits:
            request.snapshot = None

    @rule(data=st.data(), running=st.booleans())
    def abort(self, data: st.DataObject, running: bool) -> None:
        """A request may be aborted in any state, and all that it had is given back."""
        request = self.draw(data, running=running)
        if request is None:
            return
        self.requests.remove(request)
        if request.pages is not None:
            self.tide._books.release(request.pages)
            self.free(request.pages)
        if request.snapshot is not None:
            self.tide.discard(request.snapshot)

    @precondition(lambda self: hasattr(self, "tide"))
    @invariant()
    def nobody_lost_anything(self) -> None:
        """Each running request has its bytes, and the counts are those of the requests."""
        running = [request for request in self.requests if request.pages is not None]
        for request in running:
            for part, rows in request.rows.items():
                slots = self.slots(request)
                assert rows.tolist() == rows_of(self.tide.pool, *part)[slots].tolist()
        held = sum(len(request.pages or ()) for request in running)
        leased = sum(r.page_count for r in self.requests if r.pages is None)
        assert (6 - held, held, leased * BLOCK_BYTES) == books(self.tide)

    def teardown(self) -> None:
        """When all requests have ended, nothing is held."""
        if not hasattr(self, "tide"):
            return
        for request in self.requests:
            if request.snapshot is not None:
                self.tide.discard(request.snapshot)
        self.tide.close()
        self.device.close()
        assert 0 == self.tide.arena.used_bytes


TideMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestTide = TideMachine.TestCase


# ---- invalid arguments -----------------------------------------------------------------


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_page_count_resumes_nothing(device: CPUDevice, value: Any) -> None:
    """True isn't a page, nor are 2.5 pages two: the snapshot stays, and no page is held."""
    tide = make_tide(device)
    snapshot = tide.retract(acquire(tide, 1), 1)
    with pytest.raises(SlotError):
        tide.resume(snapshot, value)
    assert (5, 0, BLOCK_BYTES) == books(tide)
    tide.discard(snapshot)


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_token_count_retracts_nothing(device: CPUDevice, value: Any) -> None:
    """The request keeps its page, and nothing is leased."""
    tide = make_tide(device)
    pages = acquire(tide, 1)
    with pytest.raises(SlotError):
        tide.retract(pages, value)
    assert (4, 1, 0) == books(tide)


@pytest.mark.parametrize("value", [*NO_ROWS, 5, 1 << 62], ids=name_of)
def test_an_invalid_page_has_no_slots(device: CPUDevice, value: Any) -> None:
    """A page whose slots overflow 64 bits is refused: page 2**62 would begin at slot 0."""
    tide = make_tide(device)
    held = acquire(tide, 2)
    for pages in ([value], [held[0], value]):
        with pytest.raises(SlotError):
            tide.pool.slots_of(pages)
        with pytest.raises(SlotError):
            tide.retract(pages, 1)
    assert (3, 2, 0) == books(tide)


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_counts_and_pages_may_be_numpy_or_torch_integers(device: CPUDevice, value: Any) -> None:
    """Engines have such integers; kvtide converts them to Python's."""
    tide = make_tide(device)
    acquire(tide, 2)
    snapshot = tide.retract([value], value)
    pages = tide.resume(snapshot, value)
    assert [1] == pages
    assert [int] == [type(page) for page in pages]
    assert (3, 2, 0) == books(tide)
