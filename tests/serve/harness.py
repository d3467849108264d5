"""The tests of the engine share a model, requests, and helpers that show what is held."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence

import pytest
import torch

from kvtide.device import Device
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.selfcheck import RowCheck, find_rows
from kvtide.serve.supported import geometry_of


@functools.cache
def tiny(dtype: str = "float32") -> OpenModel:
    """Returns the small random model. It is loaded once, since no test changes it."""
    return open_model("tiny-random", dtype=dtype)


_checks: dict[tuple[object, ...], RowCheck] = {}


def check_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines of one model share a self-check, half of the time of a small one.

    Each model, thread count and device has its own. tests/serve/test_selfcheck.py tests the check.
    """

    def find_once(model: PreTrainedModel, device: Device) -> RowCheck:
        key = (model, torch.get_num_threads(), device.name)
        if key not in _checks:
            _checks[key] = find_rows(model, device)
        return _checks[key]

    monkeypatch.setattr("kvtide.serve.engine.find_rows", find_once)


def token_bytes(source: OpenModel) -> int:
    """Returns how many bytes of KV a token of this model takes."""
    return geometry_of(source.model.config, source.model.dtype, 1).token_bytes


def make_requests(
    seed: int, *, count: int = 6, longest_prompt: int = 60, longest_answer: int = 24
) -> list[Request]:
    """Makes random prompts; every other request samples with its own generator."""
    numbers = random.Random(seed)
    return [
        Request(
            f"r{number}",
            [numbers.randrange(4, 260) for _ in range(numbers.randint(1, longest_prompt))],
            SamplingParams(
                max_new_tokens=numbers.randint(1, longest_answer),
                temperature=0.9 * (number % 2),
                top_k=40 * (number % 2),
                seed=number,
            ),
        )
        for number in range(count)
    ]


def poison_released(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills slots with NaN when their page is released, so that a later read of them shows."""
    release = engine.pages.release

    def release_and_poison(pages: Iterable[int]) -> None:
        pages = list(pages)
        release(pages)
        poison(engine, pages)

    monkeypatch.setattr(engine.pages, "release", release_and_poison)
    poison(engine, range(engine.pages.page_count))


def poison(engine: Engine, pages: Sequence[int]) -> None:
    """Fills the slots of `pages` with NaN in all planes and layers."""
    pool = engine.tide.pool
    slots = torch.from_numpy(engine.tide.pool.slots_of(pages))
    for plane in pool.geometry.planes:
        for layer in range(plane.layer_count):
            pool.plane(plane.name, layer)[slots] = float("nan")


def assert_nothing_held(engine: Engine) -> None:
    """Requests hold no pages; without the blocks that they left, nothing holds any memory."""
    prefixes = engine.scheduler.prefixes
    assert engine.pages.free_count + engine.pages.held_count == engine.pages.page_count
    assert engine.pages.held_count == prefixes.idle_page_count
    prefixes.blocks.clear()
    assert engine.pages.held_count == len(prefixes.blocks.known) == 0
    if engine.store.spill is not None:  # a write that is under way has its memory until it ends
        engine.store.spill.make_room(engine.tide.arena.block_count)
    assert engine.tide.arena.used_bytes == 0


def run_all(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """Answers all requests, and returns those that finished, in that order."""
    finished: list[Request] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        finished += engine.step()
    assert_nothing_held(engine)
    return finished


def end_answers_at(engine: Engine, token_ids: Iterable[int]) -> None:
    """Lets only these tokens end the answers of requests that are added from now on."""
    engine._answering = dataclasses.replace(engine._answering, eos_ids=frozenset(token_ids))


def answers(requests: Sequence[Request]) -> list[tuple[object, ...]]:
    """Returns tokens, text, end and logits of every step, to be compared with another run."""
    return [(r.id, r.output_ids, r.text, r.finish_reason, r.logit_digests) for r in requests]


@functools.cache
def expected_answers(
    seed: int, dtype: str, page_size: int, chunk_tokens: int
) -> list[tuple[object, ...]]:
    """Returns the answers to `make_requests(seed)` in a pool that holds everything."""
    requests = make_requests(seed)
    options = EngineOptions(page_size=page_size, chunk_tokens=chunk_tokens, keep_logits=True)
    engine = Engine.build(tiny(dtype), options, requests)
    run_all(engine, requests)
    assert engine.stats.retractions == 0
    engine.close()
    return answers(requests)
