"""Requests that begin with the same tokens share their KV; no model is needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtide.serve import blocks
from kvtide.serve.prefix import block_tokens_for
from kvtide.tide import Tide
from serve.prefix_bench import PAGE_SIZE, Bench, close_benches, make, numbers, wander


@pytest.fixture(autouse=True)
def _nothing_is_held_at_the_end() -> Iterator[None]:
    yield
    close_benches()


@pytest.mark.parametrize(
    ("chunk_tokens", "page_size", "whole_chunks", "expected"),
    [
        (256, 16, True, 256),
        (7, 16, True, 112),
        (1, 1, True, 1),
        (256, 16, False, 64),
        (256, 128, False, 128),
        (256, 1, False, 64),
    ],
)
def test_block_is_whole_pages_and_whole_chunks_where_they_are_needed(
    chunk_tokens: int, page_size: int, whole_chunks: bool, expected: int
) -> None:
    """A chunk is computed alike in every prompt; the rest of a prompt may not be."""
    assert expected == block_tokens_for(chunk_tokens, page_size, whole_chunks=whole_chunks)


def test_common_chunks_are_computed_once() -> None:
    """The second request computes what comes after them, and says how many it was spared."""
    bench = Bench(16)
    first, second = make("a", numbers(19)), make("b", [*numbers(16), 90, 91])
    bench.answer(first)
    bench.answer(second)
    assert {"a": numbers(19), "b": [16, 17]} == bench.computed
    assert (0, 16) == (first.cached_tokens, second.cached_tokens)
    assert {"device": 16} == dict(bench.prefixes.stats.cached_tokens)


def test_requests_that_come_together_compute_a_prefix_once() -> None:
    """The second reads a chunk in the step after the first has computed it."""
    bench = Bench(16)
    bench.answer(make("a", numbers(18)), make("b", [*numbers(16), 90, 91]))
    assert {"a": numbers(18), "b": [16, 17]} == bench.computed


def test_in_fast_mode_requests_of_one_step_compute_a_prefix_once() -> None:
    """Both would fit in one step; the second waits a step instead of computing the same."""
    bench = Bench(64, exact=False, chunk_tokens=64, block_tokens=PAGE_SIZE)
    bench.answer(make("a", [7, 7, 7, 7, 3]), make("b", [7, 7, 7, 7, 1, 2]), make("c", [8, 8]))
    assert {"a": numbers(5), "b": [4, 5], "c": [0, 1]} == bench.computed


def test_last_token_is_always_computed() -> None:
    """Its logits are wanted, so a prompt of whole blocks computes its last block."""
    bench = Bench(16)
    bench.answer(make("a", numbers(16)))
    bench.answer(make("b", numbers(16)))
    assert numbers(8, 8) == bench.computed["b"]


def test_tokens_in_other_company_are_not_shared() -> None:
    """The same block after other tokens has other KV."""
    bench = Bench(16)
    bench.answer(make("a", numbers(17)))
    bench.answer(make("b", [*numbers(8, 50), *numbers(9, 8)]))
    assert numbers(17) == bench.computed["b"]


def test_tenants_never_read_each_others_blocks() -> None:
    """Requests with different salts share nothing; those with one salt do."""
    bench = Bench(32)
    for name, salt in (("a", b""), ("b", b"x"), ("c", b"y"), ("d", b"x")):
        bench.answer(make(name, numbers(17), salt=salt))
    spared = {name: 17 - len(tokens) for name, tokens in bench.computed.items()}
    assert {"a": 0, "b": 0, "c": 0, "d": 16} == spared


def test_salt_is_not_shown() -> None:
    """It is a secret, and a request's form may end in a log."""
    assert "secret" not in repr(make("a", [1], salt=b"secret"))


def test_answers_are_shared_in_fast_mode_alone() -> None:
    """The next turn of a conversation begins with the last one's prompt and answer."""
    for exact, expected in ((True, numbers(10, 10)), (False, numbers(3, 17))):
        bench = Bench(64, exact=exact, block_tokens=None if exact else PAGE_SIZE)
        first = make("a", numbers(10), 8)
        bench.answer(first)
        bench.answer(make("b", [*first.prompt_ids, *first.output_ids, 80, 81]))
        assert expected == bench.computed["b"]


def test_blocks_leave_from_the_end_of_the_prefix_used_least_recently() -> None:
    """Its beginning, and what was used since, is still there."""
    bench = Bench(10)
    bench.answer(make("a", numbers(20)))
    bench.answer(make("b", numbers(12, 50)))
    assert 10 - 5 - 3 == bench.pages.free_count
    bench.answer(make("c", numbers(12, 100)))  # takes 3 pages: one too many
    for request, expected in ((make("d", numbers(20)), 16), (make("e", numbers(12, 50)), 8)):
        bench.scheduler.add(request)
        bench.step()
        assert expected == request.cached_tokens
        bench.scheduler.remove(request)


def test_pages_that_hold_unread_blocks_count_as_free() -> None:
    """Otherwise a cache that fills the pool would keep requests from starting."""
    bench = Bench(6)
    bench.answer(make("a", numbers(16)))
    assert (4, 4) == (bench.pages.held_count, bench.prefixes.idle_page_count)
    for name in "bc":
        bench.scheduler.add(make(name, numbers(7, 50 * ord(name) % 200)))
    bench.step()
    assert ["b", "c"] == [request.id for request in bench.scheduler.running]


def test_requests_that_share_need_room_for_their_own_tokens_only() -> None:
    """Three of them run at once where two fit without sharing."""
    bench = Bench(8)
    first = make("a", numbers(16), 4)
    bench.scheduler.add(first)
    bench.step()
    bench.step()
    for name in "bc":
        bench.scheduler.add(make(name, [*numbers(16), 90], 2))
    bench.step()
    assert ["a", "b", "c"] == [request.id for request in bench.scheduler.running]


@pytest.mark.parametrize("page_count", [6, 8])
def test_retracted_request_reads_its_blocks_again(page_count: int) -> None:
    """Only its own tokens go to host memory, and nothing is computed again."""
    bench = Bench(page_count, host_blocks=8)
    first, second = make("a", numbers(16), 9), make("b", [*numbers(16), 90, 91, 92], 4)
    bench.scheduler.add(first)
    bench.step()
    bench.step()
    bench.scheduler.add(second)
    bench.step()
    bench.scheduler.retract(second)
    assert second.snapshot is not None
    assert second.stored - 16 == second.snapshot.token_count
    while bench.step():
        bench.end_those_that_are_done()
    assert 0 == bench.scheduler.stats.recomputed_tokens
    assert numbers(3, 16) == bench.computed["b"][:3]
    assert len(set(bench.computed["b"])) == len(bench.computed["b"])


def test_request_whose_snapshot_has_all_tokens_waits_for_room_for_all(tmp_path: Path) -> None:
    """It needs pages for tokens that others hold as well: the snapshot has them, too."""
    bench = Bench(12, host_blocks=16, disk_dir=tmp_path)
    first, second = make("a", numbers(32), 6), make("b", [*numbers(32), 90], 4)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    while second.stored < 33:
        bench.step()
    bench.scheduler.retract(second)
    assert second.snapshot is not None
    assert second.stored == second.snapshot.token_count
    while bench.step():
        bench.end_those_that_are_done()
    assert 1 == bench.scheduler.stats.resumes
    assert 0 == bench.scheduler.stats.recomputed_tokens


def test_request_whose_blocks_are_lost_is_computed_again() -> None:
    """Its own snapshot is no use without them."""
    bench = Bench(8, host_blocks=8)
    request = make("a", [*numbers(16), 90], 4)
    bench.scheduler.add(request)
    for _ in range(3):
        bench.step()
    stored = request.stored
    bench.scheduler.retract(request)
    bench.prefixes.blocks.clear()
    while bench.step():
        bench.end_those_that_are_done()
    assert (1, stored) == (bench.scheduler.stats.missing, bench.scheduler.stats.recomputed_tokens)
    assert 4 == len(request.output_ids)


def test_blocks_that_survive_are_not_counted_as_computed_again() -> None:
    """With `recompute` a request starts from the prompt that is still there."""
    bench = Bench(16, on_pressure="recompute")
    request = make("a", [*numbers(16), 90], 4)
    bench.scheduler.add(request)
    for _ in range(4):
        bench.step()
    bench.scheduler.retract(request)
    while bench.step():
        bench.end_those_that_are_done()
    assert 1 == bench.scheduler.stats.recomputed_tokens
    assert 0 == request.cached_tokens


def test_blocks_make_way_for_a_retracted_request() -> None:
    """The block used least recently is dropped, and the request's own snapshot has its place."""
    bench = Bench(8, host_blocks=2)
    bench.answer(make("a", numbers(24)))
    request = make("b", numbers(27, 50), 4)
    bench.scheduler.add(request)
    for _ in range(3):
        bench.step()
    assert 2 * bench.arena.block_bytes == bench.arena.used_bytes
    bench.step()
    bench.scheduler.retract(request)
    assert request.snapshot is not None
    assert 0 == bench.scheduler.stats.arena_full
    assert 1 == len(bench.prefixes.blocks.below)


def test_blocks_that_a_retracted_request_awaits_do_not_make_way() -> None:
    """They would cost it all that it has."""
    bench = Bench(8, host_blocks=3)
    request = make("a", numbers(17), 4)
    bench.scheduler.add(request)
    for _ in range(4):
        bench.step()
    bench.scheduler.retract(request)
    assert bench.prefixes.blocks.make_room(
        8
    )  # both blocks go below, beside the request's own tokens
    assert not bench.prefixes.blocks.give_way()
    while bench.step():
        bench.end_those_that_are_done()
    assert 0 == bench.scheduler.stats.recomputed_tokens


def test_blocks_below_keep_to_their_limit() -> None:
    """Beyond it those that were used least recently are dropped."""
    bench = Bench(8, host_blocks=8)
    bench.prefixes.blocks._below_bytes = 3 * bench.arena.block_bytes
    for number in range(6):
        bench.answer(make(str(number), numbers(17, 20 * number)))
    assert 3 == len(bench.prefixes.blocks.below)
    assert 3 * bench.arena.block_bytes == bench.arena.used_bytes


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("on_pressure", ["offload", "recompute", "wait"])
@pytest.mark.parametrize("host_blocks", [0, 6])
def test_thousands_of_steps_read_nothing_wrong(
    exact: bool, on_pressure: str, host_blocks: int
) -> None:
    """Requests of few beginnings come, are retracted and aborted at random.

    `Bench.step` compares every byte that a request reads, and counts the holders of every page.
    """
    dice = random.Random(host_blocks)
    bench = Bench(
        24,
        on_pressure=on_pressure,
        exact=exact,
        host_blocks=host_blocks,
        block_tokens=None if exact else PAGE_SIZE,
    )
    wander(bench, dice, steps=1500)
    assert bench.prefixes.stats.cached_tokens["device"] > 0


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("has_disk", [False, True])
def test_a_copy_that_fails_unexpectedly_costs_its_step_alone(
    exact: bool, has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory, or Ctrl-C: no page and no reader is left, and all can go on.

    `Bench.step` compares every byte afterwards.
    """
    monkeypatch.setattr("kvtide.serve.finder._WORTH_TOKENS", 1)
    dice = random.Random(7)
    failures = fail_at_random(monkeypatch, dice)
    bench = Bench(
        24,
        exact=exact,
        host_blocks=12,
        block_tokens=2 * PAGE_SIZE,
        disk_dir=tmp_path if has_disk else None,
    )
    beginnings = [numbers(40, first) for first in (0, 60)]
    for number in range(600):
        if number % 3 == 0 and len(bench.scheduler.running) + bench.scheduler.retracted_count < 6:
            prompt = [*dice.choice(beginnings)[: dice.randint(1, 30)], number % 7]
            bench.scheduler.add(make(str(number), prompt, dice.randint(1, 20)))
        running = bench.scheduler.running
        with suppress(_Failed):
            if running and dice.random() < 0.2:
                bench.scheduler.retract(dice.choice(running))
            bench.step()
        bench.check()
        bench.end_those_that_are_done()
    expected = {"resume", "offload" if has_disk else "retract", "_copy"}
    assert expected <= failures


class _Failed(BaseException):
    """An error of which no code knows."""


def fail_at_random(monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> set[str]:
    """Has copies of KV fail now and then; gives the names of those that have."""
    failures: set[str] = set()

    def failing(copy: Callable[..., Any]) -> Callable[..., Any]:
        def copy_or_fail(*args: Any, **options: Any) -> Any:
            if dice.random() < 0.2:
                failures.add(copy.__name__)
                raise _Failed
            return copy(*args, **options)

        return copy_or_fail

    for owner, name in ((Tide, "resume"), (Tide, "retract"), (Tide, "offload"), (blocks, "_copy")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    return failures
