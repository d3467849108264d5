"""With little KV memory, every answer has the same bits as with plenty."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.arena import budget
from kvtide.errors import UsageError
from kvtide.serve.batch import PackedBatch
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.request import Request, SamplingParams
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from serve.harness import (
    answers,
    assert_nothing_held,
    check_rows_once,
    end_answers_at,
    expected_answers,
    make_requests,
    poison_released,
    run_all,
    tiny,
    token_bytes,
)


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)


def build(pool_tokens: int, dtype: str = "float32", **options: object) -> Engine:
    """Builds an engine over the tiny model, with a pool of at most `pool_tokens` tokens."""
    kv_memory_bytes = pool_tokens * token_bytes(tiny(dtype))
    given = EngineOptions(kv_memory_bytes=kv_memory_bytes, keep_logits=True, **options)  # type: ignore[arg-type]
    return Engine.build(tiny(dtype), given)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    pool_tokens=st.integers(96, 300),
    page_size=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.sampled_from([7, 16, 64]),
    retract_at=st.lists(st.integers(0, 60), max_size=8, unique=True),
    on_pressure=st.sampled_from(["offload", "offload", "recompute"]),
)
def test_little_memory_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    dtype: str,
    pool_tokens: int,
    page_size: int,
    chunk_tokens: int,
    retract_at: list[int],
    on_pressure: str,
) -> None:
    """Pool, pages, chunks and points of retraction change neither tokens nor logits."""
    expected = expected_answers(seed, dtype, page_size, chunk_tokens)
    requests = make_requests(seed)
    engine = build(
        pool_tokens,
        dtype,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        on_pressure=on_pressure,
    )
    victims = random.Random(seed)
    with monkeypatch.context() as patch:
        poison_released(engine, patch)
        for request in requests:
            engine.add(request)
        number = 0
        while engine.has_work:
            if number in retract_at and engine.scheduler.running:
                engine.scheduler.retract(victims.choice(engine.scheduler.running))
            engine.step()
            number += 1
    assert_nothing_held(engine)
    engine.close()
    assert expected == answers(requests)


def test_retractions_happen_and_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is too small, so requests go to host memory and come back from it."""
    requests = make_requests(1, count=10, longest_answer=40)
    engine = build(100, page_size=4, chunk_tokens=16, share_prefixes=False)
    poison_released(engine, monkeypatch)
    run_all(engine, requests)
    stats = engine.stats
    engine.close()
    assert stats.retractions >= 3
    assert stats.resumes == stats.retractions == sum(request.retractions for request in requests)
    assert stats.offloaded_bytes == stats.restored_bytes > 0
    assert stats.recomputed_tokens == 0
    assert stats.peak_host_bytes > 0
    assert stats.peak_pool_tokens <= stats.pool_tokens == 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skipped_restore_is_noticed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """A control: if the bytes are not brought back, the comparison fails."""
    expected = expected_answers(2, dtype, 4, 16)
    requests = make_requests(2)
    engine = build(300, dtype, page_size=4, chunk_tokens=16)
    poison_released(engine, monkeypatch)
    monkeypatch.setattr(Tide, "restore", lambda *_, **__: None)
    for request in requests:
        engine.add(request)
    while len(requests[0].output_ids) < 3:  # its last tokens are in no block that others share
        engine.step()
    engine.scheduler.retract(engine.scheduler.running[0])
    while engine.has_work:
        engine.step()
    engine.close()
    assert expected != answers(requests)


@pytest.mark.parametrize("retracted", [False, True])
def test_abort_at_every_step_leaks_nothing(retracted: bool) -> None:
    """A request may be aborted while it waits, reads its prompt, answers or is retracted."""
    engine = build(200, page_size=4, chunk_tokens=16)
    for number in range(24):
        requests = make_requests(3, count=3)
        for request in requests:
            engine.add(request)
        for _ in range(number):
            engine.step()
        if retracted and engine.scheduler.running:
            engine.scheduler.retract(engine.scheduler.running[-1])
        for request in requests:
            engine.abort(request.id)
        assert not engine.has_work
        assert_nothing_held(engine)
    engine.close()


def test_abort_of_a_request_leaves_the_others_alone() -> None:
    """The others' answers have the same bits as if nobody had been aborted."""
    expected = {answer[0]: answer for answer in expected_answers(4, "float32", 4, 16)}
    requests = make_requests(4)
    engine = build(150, page_size=4, chunk_tokens=16)
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.abort("r1")
    engine.abort("nobody")
    while engine.has_work:
        engine.step()
    assert_nothing_held(engine)
    engine.close()
    others = [answer for answer in answers(requests) if answer[0] != "r1"]
    assert requests[1].finish_reason == "abort"
    assert [expected[answer[0]] for answer in others] == others


def run_with_a_retraction(engine: Engine, requests: list[Request]) -> Request:
    """Answers all requests, and retracts the first one that has three new tokens."""
    for request in requests:
        engine.add(request)
    victim = None
    while victim is None:
        assert engine.has_work, "no request had three tokens and more to come"
        engine.step()
        victim = next((r for r in engine.scheduler.running if len(r.output_ids) == 3), None)
    engine.scheduler.retract(victim)
    while engine.has_work:
        engine.step()
    assert_nothing_held(engine)
    engine.close()
    return victim


def test_full_arena_degrades_to_recompute_and_stays_exact() -> None:
    """Without host memory the KV is computed again in the same steps, to the same bits."""
    expected = expected_answers(5, "float32", 4, 16)
    requests = make_requests(5)
    engine = build(300, page_size=4, chunk_tokens=16, host_memory_bytes=0)
    run_with_a_retraction(engine, requests)
    assert engine.stats.retractions == engine.scheduler.stats.arena_full == 1
    assert engine.stats.recomputed_tokens > 0
    assert engine.stats.offloaded_bytes == 0
    assert expected == answers(requests)
    assert all(request.exact for request in requests)


def test_fast_mode_says_what_is_not_exact() -> None:
    """Only the request that was computed again in fast mode is marked."""
    requests = make_requests(5)
    engine = build(300, page_size=4, chunk_tokens=16, host_memory_bytes=0, exact=False)
    victim = run_with_a_retraction(engine, requests)
    assert [victim] == [request for request in requests if not request.exact]


def test_damaged_snapshot_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that changed in host memory aren't restored; the request's KV is computed again."""
    expected = expected_answers(5, "float32", 4, 16)
    requests = make_requests(5)
    engine = build(300, page_size=4, chunk_tokens=16)
    retract = engine.tide.retract

    def retract_and_flip(pages: list[int], token_count: int, **options: Any) -> Snapshot:
        snapshot = retract(pages, token_count, **options)
        snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
        return snapshot

    monkeypatch.setattr(engine.tide, "retract", retract_and_flip)
    run_with_a_retraction(engine, requests)
    assert engine.scheduler.stats.damaged == 1
    assert engine.stats.recomputed_tokens > 0
    assert expected == answers(requests)


def test_request_that_can_never_fit_fails_alone() -> None:
    """Its error names its need and the pool's size; the others finish."""
    requests = [*make_requests(0, count=2), Request("big", [5] * 90, SamplingParams(20))]
    engine = build(96)
    finished = run_all(engine, requests)
    engine.close()
    assert {"r0", "r1", "big"} == {request.id for request in finished}
    assert requests[2].finish_reason == "error"
    assert "109 tokens (90 of its prompt and 19 of 20 new ones" in str(requests[2].error)
    assert "holds 96" in str(requests[2].error)
    assert all(request.error is None and request.output_ids for request in requests[:2])


def test_prompt_longer_than_the_models_context_fails_alone() -> None:
    """The model was never trained for such positions, so the answer would be nonsense."""
    request = Request("r", [5] * 8193, SamplingParams(4))
    engine = build(10_000)
    run_all(engine, [request])
    engine.close()
    assert request.finish_reason == "error"
    assert "its prompt has 8193 tokens, the model has 8192 positions" in str(request.error)


def test_an_answer_past_the_models_context_is_cut_and_counted() -> None:
    """The answer ends with `length`, and the request's parameters stay what was asked for."""
    requests = [Request(str(i), [5] * 8190, SamplingParams(1_000_000, seed=i)) for i in range(2)]
    engine = build(10_000, host_memory_bytes=0)
    end_answers_at(engine, [])
    for request in requests:
        engine.add(request)
    assert 2 == engine.stats.cut
    while engine.has_work:
        engine.step()
    engine.close()
    assert [("length", 3)] * 2 == [(r.finish_reason, len(r.output_ids)) for r in requests]
    assert 1_000_000 == requests[0].params.max_new_tokens


def test_a_request_that_failed_before_is_given_back() -> None:
    """Such a request needs no tokens and no room; its prompt was too long, for example."""
    failed = Request("r", [], error="its prompt is too long")
    fine = make_requests(0, count=1)[0]
    engine = Engine.build(tiny("float32"), EngineOptions(), [failed, fine])
    assert {"r", "r0"} == {request.id for request in run_all(engine, [failed, fine])}
    assert 1 == engine.stats.failed
    engine.close()
    assert ("error", "its prompt is too long") == (failed.finish_reason, failed.error)
    assert fine.error is None


def test_a_request_whose_tier_fails_unexpectedly_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each later step would wait for a request that no scheduler has."""

    def fail(*_: object, **__: object) -> bool:
        raise RuntimeError("the tier failed")

    engine = build(300)
    monkeypatch.setattr(engine._requests, "take_over", fail)
    request = make_requests(0, count=1)[0]
    with pytest.raises(RuntimeError, match="the tier failed"):
        engine.add(request)
    assert not engine.has_work
    monkeypatch.undo()
    assert [request] == run_all(engine, [request])
    engine.close()


def test_many_requests_share_a_pool_for_those_that_run_at_once() -> None:
    """The pool has room for the longest of them; a prompt that is too long doesn't count."""
    requests = [Request(str(i), [5] * 20, SamplingParams(13)) for i in range(100)]
    requests += [Request("long", [5] * 8191, SamplingParams(1_000_000))]
    requests += [Request("too long", [5] * 9000, SamplingParams(1))]
    engine = Engine.build(tiny("float32"), EngineOptions(max_running=4), requests)
    assert 8192 + 3 * 32 == engine.stats.pool_tokens
    engine.close()


def test_waiting_gives_the_same_answers_without_a_retraction() -> None:
    """The pool is so small that requests are retracted in it otherwise."""
    requests = make_requests(1, count=10, longest_answer=40)
    engine = build(100, page_size=4, chunk_tokens=16, on_pressure="wait", host_memory_bytes=0)
    run_all(engine, requests)
    stats = engine.stats
    engine.close()
    assert 0 == stats.retractions == stats.recomputed_tokens
    roomy = make_requests(1, count=10, longest_answer=40)
    engine = build(5_000, page_size=4, chunk_tokens=16)
    run_all(engine, roomy)
    engine.close()
    assert answers(roomy) == answers(requests)


def test_more_memory_than_is_free_is_refused() -> None:
    """It is refused at the start, before the system kills the process when the pool fills up."""
    with pytest.raises(UsageError, match="are free"):
        build(1 << 40)
    with pytest.raises(UsageError, match="are free"):
        build(96, host_memory_bytes=1 << 50)


def test_host_memory_is_a_part_of_what_the_pool_leaves_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the part of the pool that has no memory yet is subtracted from the free memory."""
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 80_000_000)
    for untouched in (0, 4_000_000):
        monkeypatch.setattr("kvtide.serve.engine.untouched_bytes_of", lambda _, n=untouched: n)
        engine = build(96)
        assert (80_000_000 - untouched) // 4 == engine.tide.arena.limit_bytes
        engine.close()


def test_request_that_just_fits_is_answered() -> None:
    """Nobody reads the last token's KV, so a pool may be full to the last slot."""
    request = Request("r", [5] * 90, SamplingParams(7))
    engine = build(96)
    run_all(engine, [request])
    engine.close()
    assert request.error is None
    assert len(request.output_ids) == 7 or request.finish_reason == "stop"


def test_pool_smaller_than_a_page_is_refused() -> None:
    """It is refused before anything is loaded or allocated, with both sizes."""
    with pytest.raises(UsageError, match="holds no page"):
        build(15)


def test_prompt_without_tokens_is_refused() -> None:
    """Such a request has nothing to predict from."""
    engine = build(96)
    with pytest.raises(UsageError, match="no tokens"):
        engine.add(Request("r", []))
    engine.close()


@pytest.mark.parametrize("token", [-1, 10**6])
def test_token_of_another_vocabulary_is_refused(token: int) -> None:
    """It is refused when it arrives; in a step it would crash the requests beside it."""
    engine = build(96)
    with pytest.raises(UsageError, match=f"token {token} isn't one of the model's 260 tokens"):
        engine.add(Request("r", [5, token]))
    assert not engine.has_work
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """No token can be chosen from NaN; the other requests get the same answers."""
    expected = {answer[0]: answer for answer in expected_answers(4, "float32", 16, 256)}
    bad = Request("bad", [9] * 5, SamplingParams(5, temperature=temperature))
    requests = make_requests(4)
    engine = build(400)
    forward = engine._model.forward

    def forward_and_spoil(batch: PackedBatch) -> torch.Tensor:
        logits = forward(batch).clone()
        logits[0] = float("nan")
        return logits

    engine.add(bad)
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", forward_and_spoil)
        assert [bad] == engine.step()
    assert bad.finish_reason == "error"
    assert "NaN" in str(bad.error)
    run_all(engine, requests)
    engine.close()
    assert [expected[request.id] for request in requests] == answers(requests)


def test_stop_string_and_end_token_end_an_answer() -> None:
    """The stop string is cut off; the end token belongs to the answer, but not to its text."""
    free = Request("free", [5] * 20, SamplingParams(12))
    engine = build(400)
    run_all(engine, [free])
    stop = free.text[4:6]
    stopped = Request("stopped", [5] * 20, SamplingParams(12, stop=(stop,)))
    run_all(engine, [stopped])
    end_answers_at(engine, [free.output_ids[3]])
    ended = Request("ended", [5] * 20, SamplingParams(12))
    run_all(engine, [ended])
    engine.close()
    assert free.finish_reason == "length"
    assert ("stop", free.text[: free.text.index(stop)]) == (stopped.finish_reason, stopped.text)
    first = free.output_ids.index(free.output_ids[3])
    assert ("stop", free.output_ids[: first + 1]) == (ended.finish_reason, ended.output_ids)


def test_tokenizer_without_a_fast_form_is_refused() -> None:
    """The tokenizers library makes text from tokens, and it needs the fast form."""
    source = dataclasses.replace(tiny(), tokenizer=object())
    with pytest.raises(UsageError, match="no fast form"):
        Engine.build(source, EngineOptions(kv_memory_bytes=1 << 20))


def test_id_in_use_is_refused() -> None:
    """Two requests with one id couldn't be told apart."""
    engine = build(96)
    engine.add(Request("r", [5]))
    with pytest.raises(UsageError, match="is in use already"):
        engine.add(Request("r", [6]))
    engine.close()
