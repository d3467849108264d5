"""Whether requests may run in pages that an older one can't use yet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.serve.request import Request
from serve.prefix_bench import PAGE_SIZE, Bench, close_benches, make, numbers


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_benches()


def test_blocks_that_nobody_reads_make_way_for_what_fills_gaps() -> None:
    """A server that runs for long has its host memory full of them."""
    bench = Bench(4, host_blocks=2)
    for number in range(4):
        bench.answer(make(str(number), numbers(8, 20 * number)))
    assert (0, True) == (bench.arena.free_count, bool(bench.prefixes.blocks.below))
    assert bench.scheduler._admission.may_fill_gaps(make("small", numbers(3)))
    assert not bench.scheduler._admission.may_fill_gaps(make("large", numbers(6 * PAGE_SIZE)))


@pytest.mark.parametrize("has_disk", [False, True])
def test_nothing_fills_gaps_where_host_memory_is_full(has_disk: bool, tmp_path: Path) -> None:
    """What is retracted would be computed again, or a tier would have to be waited for."""
    bench = Bench(4, host_blocks=2, disk_dir=tmp_path if has_disk else None)
    lease = bench.arena.lease(1)
    assert bench.scheduler._admission.may_fill_gaps(make("small", numbers(3)))
    lease.extend(1)
    assert not bench.scheduler._admission.may_fill_gaps(make("small", numbers(3)))
    lease.release()


def test_one_that_an_earlier_server_left_is_not_older_than_who_waited_before() -> None:
    """It comes back before those that wait; then the oldest of all keeps its pages."""
    bench = Bench(8, host_blocks=16)
    left = make("left", numbers(9, 100), 12)
    bench.scheduler.add(left)
    for _ in range(3):
        bench.step()
    bench.scheduler.retract(left)
    bench.scheduler._retracted.remove(left)
    oldest = make("oldest", numbers(9), 20)
    bench.scheduler.add(oldest)
    bench.scheduler.go_on(left)
    bench.step()
    assert ["oldest", "left"] == [request.id for request in bench.scheduler.running]
    while left in bench.scheduler.running:
        bench.step()
    assert ["oldest"] == [request.id for request in bench.scheduler.running]


def test_an_older_request_keeps_its_pages_when_a_newer_one_comes_back() -> None:
    """The blocks of one that leaves meanwhile are no room beside those of the one that reads them.

    "back" has its first tokens in pages of "gap": if that leaves, these pages are still needed.
    """
    bench = Bench(16, host_blocks=64, block_tokens=2 * PAGE_SIZE)
    old, back = make("old", numbers(21, 100), 40), make("back", [*numbers(24), *numbers(9, 60)], 30)
    bench.scheduler.add(old)
    bench.scheduler.add(back)
    while not bench.scheduler.retracted:
        bench.step()
    bench.scheduler.add(make("gap", [*numbers(24), 90], 30))
    assert [("old", 1), ("gap", 1)] == bench.step()
    for _ in range(20):
        bench.step()
        assert old in bench.scheduler.running
    assert 0 == old.retractions


@pytest.mark.parametrize("seed", range(4))
def test_only_newer_requests_make_room_for_one_that_comes_back(seed: int) -> None:
    """Nobody leaves for nothing: `Bench` checks it. Chats that begin alike share a small pool."""
    dice = random.Random(seed)
    bench = Bench(16 + seed, host_blocks=200, block_tokens=2 * PAGE_SIZE, exact=seed % 2 == 0)
    for step in range(300):
        if dice.random() < 0.4 and len(bench.scheduler.running) < 6:
            end = [200 + dice.randrange(3) for _ in range(dice.randint(1, 12))]
            prompt = [*numbers(dice.choice([8, 16, 24])), *end]
            bench.scheduler.add(make(str(step), prompt, dice.randint(1, 25)))
        bench.step()
        bench.end_those_that_are_done()
    assert bench.scheduler.stats.resumes > 0


@pytest.mark.parametrize("on_pressure", ["offload", "recompute", "wait"])
@pytest.mark.parametrize("max_running", [1, 3, 64])
def test_somebody_can_always_go_on(on_pressure: str, max_running: int) -> None:
    """`Bench.step` checks it. Some requests fill the whole pool, and some are sent away."""
    dice = random.Random(max_running)
    bench = Bench(12, on_pressure=on_pressure, host_blocks=6, max_running=max_running)
    alive: list[Request] = []
    for number in range(250):
        if len(alive) < 6 and dice.random() < 0.4:
            prompt = [*numbers(dice.choice([8, 16, 24])), *[number % 5] * dice.randint(0, 8)]
            new_tokens = dice.choice([1, 5, 12 * PAGE_SIZE - len(prompt) + 1])
            alive.append(make(str(number), prompt, new_tokens))
            bench.scheduler.add(alive[-1])
        running = bench.scheduler.running
        if running and on_pressure != "wait" and dice.random() < 0.1:
            bench.scheduler.retract(dice.choice(running))
        if alive and dice.random() < 0.05:
            bench.scheduler.remove(alive.pop(dice.randrange(len(alive))))
        bench.step()
        bench.end_those_that_are_done()
        alive = [r for r in alive if len(r.output_ids) < r.params.max_new_tokens]
