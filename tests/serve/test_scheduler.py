"""Which requests run, wait or give up their pages; no model is needed."""

from __future__ import annotations

import pytest

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.layout import GQA
from kvtide.pool import PageAllocator, Pool
from kvtide.serve.admission import SchedulerOptions
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.scheduler import Scheduler
from kvtide.tide import Tide
from support.broken_devices import BreakingDevice

PAGE_SIZE = 4


def make_scheduler(
    page_count: int,
    *,
    chunk_tokens: int = 8,
    max_running: int = 64,
    on_pressure: str = "offload",
    host_pages: int = 1 << 10,
) -> tuple[Scheduler, PageAllocator]:
    """Makes a scheduler over a pool of small rows, and host memory for so many pages."""
    geometry = GQA.bind(dtype="uint8", layer=1, token=PAGE_SIZE, head=1, head_dim=2, v_head_dim=2)
    device = open_device("cpu")
    page_bytes = geometry.page_bytes
    arena = HostArena(device, limit_bytes=host_pages * page_bytes, block_bytes=page_bytes)
    pages = PageAllocator(page_count)
    tide = Tide(Pool.create(geometry, device, page_count=page_count), arena, pages)
    options = SchedulerOptions(
        chunk_tokens=chunk_tokens, max_running=max_running, on_pressure=on_pressure, replay=True
    )
    return Scheduler(tide, pages, options), pages


def make_request(name: str, prompt_tokens: int, new_tokens: int = 4) -> Request:
    """Makes a request whose tokens don't matter."""
    return Request(name, [7] * prompt_tokens, SamplingParams(max_new_tokens=new_tokens))


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Plans a step, pretends that the model ran it, and returns names and token counts."""
    steps = scheduler.plan()
    scheduler.note_computed(steps)
    for request, _ in steps:
        if request.stored == request.token_count:
            request.output_ids.append(7)
    return [(request.id, count) for request, count in steps]


def end_all(scheduler: Scheduler) -> None:
    """Ends all requests that hold something."""
    for request in (*scheduler.running, *scheduler.retracted):
        scheduler.remove(request)


def test_prompts_are_cut_at_multiples_of_the_chunk() -> None:
    """The last piece is shorter; after it come single tokens."""
    scheduler, _ = make_scheduler(8)
    scheduler.add(make_request("a", 19))
    assert [[("a", 8)], [("a", 8)], [("a", 3)], [("a", 1)]] == [run_step(scheduler) for _ in "1234"]


def test_chunk_that_exceeds_the_step_waits_whole() -> None:
    """The chunk isn't cut to fit, since its length must not depend on other requests."""
    scheduler, _ = make_scheduler(16)
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", 8))
    assert [("a", 5)] == run_step(scheduler)
    assert [("a", 1), ("b", 8)] == run_step(scheduler)


@pytest.mark.parametrize(
    ("on_pressure", "host_pages", "expected"),
    [("offload", 64, "abdc"), ("offload", 0, "abcd"), ("recompute", 64, "abcd")],
)
def test_newest_is_retracted_first_and_comes_back_before_new_ones(
    on_pressure: str, host_pages: int, expected: str
) -> None:
    """Only where its KV would be kept a new one runs in pages that the older can't use yet."""
    scheduler, pages = make_scheduler(
        8, chunk_tokens=64, on_pressure=on_pressure, host_pages=host_pages
    )
    requests = [make_request(name, 7, 20) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    while not scheduler.retracted_count:
        run_step(scheduler)
    assert [("a", 0), ("b", 0), ("c", 1)] == [(r.id, r.retractions) for r in requests]
    scheduler.add(make_request("d", 1, 1))
    started: list[str] = []
    while scheduler.plan():
        started += [name for name, _ in run_step(scheduler) if name not in started]
        for request in scheduler.running:
            if len(request.output_ids) == request.params.max_new_tokens:
                scheduler.remove(request)
    assert started == list(expected)
    assert pages.free_count == 8


def test_resume_gets_other_pages_than_retract_gave_up() -> None:
    """Other requests may take the pages meanwhile; the request comes back with as many."""
    scheduler, pages = make_scheduler(6)
    request = make_request("a", 6)
    scheduler.add(request)
    run_step(scheduler)
    before = list(request.pages)
    scheduler.retract(request)
    assert ([], 6) == (request.pages, request.stored)
    assert pages.held_count == 0
    taken = pages.acquire(1)
    assert taken == before[:1]
    run_step(scheduler)
    assert len(request.pages) == 2
    assert not set(request.pages) & set(taken)
    assert request.snapshot is None


def test_slots_lost_in_a_restore_are_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gives the slots up and computes from its first token; the others go on."""
    device = BreakingDevice()
    monkeypatch.setattr("test_scheduler.open_device", lambda name: device)
    scheduler, pages = make_scheduler(8, chunk_tokens=64)
    old, new = make_request("a", 7), make_request("b", 7, 20)
    for request in (old, new):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.retract(new)
    assert scheduler._tide.arena.used_bytes
    device.breaks_at = 0
    assert [("a", 1), ("b", 7)] == run_step(scheduler)
    assert (1, 0) == (scheduler.stats.lost, scheduler.stats.damaged)
    assert (None, 7) == (new.snapshot, scheduler.stats.recomputed_tokens)
    assert 0 == scheduler._tide.arena.used_bytes
    for request in (old, new):
        scheduler.remove(request)
    assert 8 == pages.free_count
    device.close()


def test_request_without_kv_leaves_nothing_to_save() -> None:
    """A request that is retracted before its first step has no snapshot and loses nothing."""
    scheduler, pages = make_scheduler(6)
    requests = [make_request("a", 8), make_request("b", 8)]
    for request in requests:
        scheduler.add(request)
    assert [("a", 8)] == run_step(scheduler)
    scheduler.retract(requests[1])
    assert requests[1].snapshot is None
    assert scheduler.stats.recomputed_tokens == 0
    assert scheduler.stats.retractions == requests[1].retractions == 0
    assert pages.held_count == len(requests[0].pages)


def test_recompute_starts_from_the_first_token() -> None:
    """Without offload the KV is dropped, counted, and computed in the same pieces again."""
    scheduler, _ = make_scheduler(8, on_pressure="recompute")
    request = make_request("a", 11)
    scheduler.add(request)
    first = [run_step(scheduler) for _ in range(4)]
    scheduler.retract(request)
    assert first == [run_step(scheduler) for _ in range(4)]
    assert scheduler.stats.recomputed_tokens == 13
    assert len(request.output_ids) == 3


def test_no_more_than_max_running_run_at_once() -> None:
    """The limit holds even if there is room for more."""
    scheduler, _ = make_scheduler(64, max_running=2)
    for name in "abc":
        scheduler.add(make_request(name, 2))
    run_step(scheduler)
    assert ["a", "b"] == [request.id for request in scheduler.running]
    assert scheduler.waiting_count == 1


def test_newcomer_leaves_room_for_prompts_under_way() -> None:
    """A page that a running prompt will still need isn't free, though nobody holds it yet."""
    scheduler, pages = make_scheduler(5)
    scheduler.add(make_request("a", 16, 1))
    scheduler.add(make_request("b", 5, 1))
    assert [("a", 8)] == run_step(scheduler)
    assert pages.free_count == 3
    assert [("a", 8)] == run_step(scheduler)
    assert scheduler.waiting_count == 1


@pytest.mark.parametrize(("on_pressure", "steps"), [("offload", 8), ("recompute", PAGE_SIZE)])
def test_retracted_request_waits_for_room_for_the_next_steps(on_pressure: str, steps: int) -> None:
    """Otherwise it would be retracted again at once, or the other one that runs."""
    scheduler, pages = make_scheduler(16, chunk_tokens=64, on_pressure=on_pressure)
    old, new = make_request("a", 5, 40), make_request("b", 6, 40)
    for request in (old, new):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.retract(new)
    needed = sum(-(-(request.token_count + steps) // PAGE_SIZE) for request in (old, new))
    taken = pages.acquire(17 - needed) or []
    assert ["a"] == [name for name, _ in run_step(scheduler)]
    old.output_ids.pop()
    old.stored -= 1
    pages.release(taken[:1])
    assert ["a", "b"] == [name for name, _ in run_step(scheduler)]


def test_an_answer_that_ends_soon_needs_no_room_for_more_steps() -> None:
    """A request comes back where all that is left of both has room."""
    scheduler, _ = make_scheduler(4, chunk_tokens=64)
    old, new = make_request("a", 5, 3), make_request("b", 6, 3)
    for request in (old, new):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.retract(new)
    assert ["a", "b"] == [name for name, _ in run_step(scheduler)]


def test_an_older_request_takes_the_pages_that_newer_ones_filled_meanwhile() -> None:
    """However many small ones come, it is back as soon as their pages are enough for it."""
    scheduler, pages = make_scheduler(6, chunk_tokens=64)
    old, large = make_request("old", 9, 4), make_request("large", 8, 30)
    for request in (old, large):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.retract(large)
    for number in range(20):
        scheduler.add(make_request(f"small {number}", 2, 30))
    for _ in range(3):
        assert ["old", "small 0"] == [name for name, _ in run_step(scheduler)][:2]
        assert large in scheduler.retracted
    scheduler.remove(old)
    assert pages.free_count < 5
    for _ in range(8):
        assert "large" == run_step(scheduler)[0][0]
        assert (1, 6) == (large.retractions, pages.free_count + pages.held_count)
    assert scheduler.stats.retractions > 1
    assert 0 == scheduler.stats.recomputed_tokens
    end_all(scheduler)


def test_no_more_run_than_may_when_an_older_one_comes_back() -> None:
    """The limit holds for requests that run in the gaps, too."""
    scheduler, _ = make_scheduler(6, chunk_tokens=64, max_running=2)
    requests = [make_request("a", 7, 20), make_request("b", 7, 20), make_request("c", 2, 20)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    scheduler.retract(requests[1])
    assert ["a", "c"] == [name for name, _ in run_step(scheduler)]
    for _ in range(4):
        run_step(scheduler)
        assert len(scheduler.running) <= 2
    scheduler.remove(requests[0])
    assert "b" == run_step(scheduler)[0][0]
    end_all(scheduler)


def test_with_wait_nothing_is_retracted() -> None:
    """A request starts when its longest answer has room, so fewer run in the same pool."""
    retractions = {}
    for on_pressure in ("wait", "offload"):
        scheduler, pages = make_scheduler(8, chunk_tokens=64, on_pressure=on_pressure)
        for name in "abcd":
            scheduler.add(make_request(name, 7, 10))  # 4 pages of 4 tokens at the end
        most = 0
        while scheduler.plan():
            run_step(scheduler)
            most = max(most, len(scheduler.running))
            for request in scheduler.running:
                if len(request.output_ids) == request.params.max_new_tokens:
                    scheduler.remove(request)
        assert 8 == pages.free_count
        retractions[on_pressure] = (most, scheduler.stats.retractions > 0)
    assert {"wait": (2, False), "offload": (4, True)} == retractions
