"""On the simulated accelerator the engine gives the CPU's tokens and logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import simnpu
import torch

from kvtide.arena import Lease
from kvtide.errors import KvtideError
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.paged import PagedModel
from kvtide.serve.request import Request, SamplingParams
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from serve.harness import assert_nothing_held, make_requests, run_all, token_bytes
from support.simulated import SCHEDULES, lazy_accelerator, simulated

Answers = list[tuple[str, list[int], list[int], str | None]]
_POOL_TOKENS = 56


def answer(source: OpenModel, device: str, *, pool_tokens: int | None) -> tuple[Answers, Engine]:
    """Returns every request's tokens and logits, and the closed engine, which holds nothing."""
    requests = make_requests(5, count=5, longest_prompt=24, longest_answer=24)
    size = token_bytes(source)
    options = EngineOptions(
        device=device,
        kv_memory_bytes=None if pool_tokens is None else pool_tokens * size,
        host_memory_bytes=400 * size,
        page_size=8,
        chunk_tokens=16,
        keep_logits=True,
        share_prefixes=False,
    )
    engine = Engine.build(source, options, requests)
    run_all(engine, requests)
    assert_nothing_held(engine)
    engine.close()
    return [_outcome(request) for request in requests], engine


def _outcome(request: Request) -> tuple[str, list[int], list[int], str | None]:
    return request.id, request.output_ids, request.logit_digests, request.error


@functools.cache
def expected(dtype: str) -> Answers:
    """Returns the CPU's answers with room for all requests."""
    return answer(open_model("tiny-random", dtype=dtype), "cpu", pool_tokens=None)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_those_of_the_cpu(schedule: str, dtype: str) -> None:
    """The pool is too small for all requests, so KV leaves and comes back."""
    with simulated(schedule) as name:
        source = open_model("tiny-random", dtype=dtype)
        answers, engine = answer(source, name, pool_tokens=_POOL_TOKENS)
        assert expected(dtype) == answers
        assert engine.stats.retractions > 0
        assert engine.stats.offloaded_bytes == engine.stats.restored_bytes > 0
        del source, engine


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_that_share_a_prefix_get_the_answers_of_the_cpu(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks stay on the device, leave it and come back; the CPU's answers shared nothing."""
    monkeypatch.setattr("kvtide.serve.prefix._FEW_TOKENS", 8)
    with simulated(schedule) as name:
        source = open_model("tiny-random", dtype="float32")
        answers, engine = conversation(source, name, shares=True)
        assert conversation(source, "cpu", shares=False)[0] == answers
        assert {"device", "host"} == set(engine.stats.cached_tokens)
        del source, engine


def conversation(source: OpenModel, device: str, *, shares: bool) -> tuple[Answers, Engine]:
    """Answers three turns of two conversations in turns, in a pool for one of them."""
    size = token_bytes(source)
    options = EngineOptions(
        device=device,
        kv_memory_bytes=_POOL_TOKENS * size if shares else None,
        host_memory_bytes=1 << 24,
        page_size=8,
        chunk_tokens=16,
        keep_logits=True,
        share_prefixes=shares,
    )
    turns = [
        Request(f"{turn} {who}", [*range(who, who + 14 * turn)], SamplingParams(3))
        for turn in (1, 2, 3)
        for who in (10, 90)
    ]
    engine = Engine.build(source, options, turns)
    for request in turns:
        engine.add(request)
        while engine.has_work:
            engine.step()
    assert_nothing_held(engine)
    engine.close()
    return [_outcome(request) for request in turns], engine


# ---- the engine, broken -----------------------------------------------------------------------


def logits_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The engine reads logits before their copy has arrived."""
    patch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.to("cpu", non_blocking=True))


def inputs_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """The engine frees the memory of a step's inputs before their copy has read it."""
    to: Any = torch.Tensor.to

    def hasty(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
        is_upload = bool(given) and isinstance(given[0], torch.device) and given[0].type == "npu"
        return to(tensor, *given, **options, **({"non_blocking": True} if is_upload else {}))

    forward = PagedModel.forward

    def with_hasty_inputs(model: PagedModel, batch: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "to", hasty)
            return forward(model, batch)

    patch.setattr(PagedModel, "forward", with_hasty_inputs)


def restore_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A request goes on before its KV is back."""
    patch.setattr(Tide, "restore", Tide.start_restore)
    patch.setattr(Tide, "discard", lambda tide, snapshot: snapshot.lease.release())
    patch.setattr(Lease, "in_use", False)
    patch.setattr(Tide, "close", lambda tide: None)


def offload_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A request's pages are given to another before they were saved."""

    def retract(tide: Tide, pages: Any, token_count: int, *, key: str = "") -> Snapshot:
        tide._books.release(pages)
        other = torch.from_numpy(tide.pool.slots_of(pages)).to(tide.pool.device.torch_device)
        for layer in range(4):
            tide.pool.plane("k", layer).index_fill_(0, other, 1.0)
        return tide.offload(tide.pool.slots_of(pages)[:token_count], key=key)

    patch.setattr(Tide, "retract", retract)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    logits_not_waited_for,
    inputs_not_waited_for,
    restore_not_waited_for,
    offload_not_waited_for,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_engine_that_does_not_wait_is_found(fault: Callable[..., None]) -> None:
    """The answers differ, or the simulated device raises an error."""
    reference = expected("float32")
    with simulated("lazy") as name, pytest.MonkeyPatch.context() as patch:
        source = open_model("tiny-random", dtype="float32")
        patch.setattr("kvtide.serve.engine.open_device", lazy_accelerator)
        try:
            fault(patch)
            same = reference == answer(source, name, pool_tokens=_POOL_TOKENS)[0]
            torch.accelerator.synchronize()
        except (KvtideError, RuntimeError):
            same = False
        simnpu.reset()  # runs what is pending, and drops its violations
        del source
    assert not same


def test_an_engine_with_the_latest_possible_moves_is_exact() -> None:
    """A control of the faults: the same device, without a fault in the code."""
    with simulated("lazy") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide.serve.engine.open_device", lazy_accelerator)
        source = open_model("tiny-random", dtype="float32")
        assert expected("float32") == answer(source, name, pool_tokens=_POOL_TOKENS)[0]
        del source
