"""Answers of requests that share a prefix's KV have the same bits as answers computed alone."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.serve import engine as engine_module
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.selfcheck import RowCheck
from kvtide.tier.inspection import inspect_folder
from kvtide.tier.namespace import is_shared
from serve.harness import (
    answers,
    assert_nothing_held,
    check_rows_once,
    end_answers_at,
    poison_released,
    run_all,
    tiny,
    token_bytes,
)
from serve.small_models import model_of

CHUNK = 16
BLOCK_BYTES = 1 << 16
FAMILIES = (
    *("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "OPT", "GPTJ"),
    *("GPTNeoX", "Nemotron", "StableLm"),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares blocks of two pages, and lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)
    monkeypatch.setattr("kvtide.serve.prefix._FEW_TOKENS", 8)


def make_requests(*, vocab_size: int = 199, salt: bytes = b"") -> list[Request]:
    """Makes requests with three beginnings of several chunks; every other one samples."""
    dice = random.Random(3)
    beginnings = [[dice.randrange(4, vocab_size) for _ in range(70)] for _ in range(3)]
    return [
        Request(
            f"r{number}",
            beginnings[number % 3][: dice.randint(30, 70)]
            + [dice.randrange(4, vocab_size) for _ in range(dice.randint(0, 20))],
            SamplingParams(dice.randint(2, 12), temperature=0.9 * (number % 2), seed=number),
            salt=salt,
        )
        for number in range(12)
    ]


def build(source: OpenModel, *, pool_tokens: int | None = None, **options: object) -> Engine:
    """Builds an engine of small chunks and pages, in which answers end by their length alone."""
    engine = Engine.build(
        source,
        EngineOptions(
            kv_memory_bytes=None if pool_tokens is None else pool_tokens * token_bytes(source),
            keep_logits=True,
            **{  # type: ignore[arg-type]
                "host_memory_bytes": 1 << 24,
                "page_size": 4,
                "chunk_tokens": CHUNK,
                **options,
            },
        ),
        make_requests(),
    )
    end_answers_at(engine, [])
    return engine


def cut_anywhere(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Lets prompts be cut into steps of random lengths."""
    dice = random.Random(seed)

    def next_count(request: Request, chunk_tokens: int, *, replay: bool) -> int:
        left = len(request.prompt_ids) - request.stored
        return dice.randint(1, min(left, chunk_tokens)) if left > 0 else 1

    patch.setattr(Request, "next_count", next_count)


@pytest.fixture
def whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the self-check find that bits depend on how a prompt is cut."""

    find_rows_once: Any = vars(engine_module)["find_rows"]

    def find(model: object, device: object) -> RowCheck:
        found: RowCheck = find_rows_once(model, device)
        assert found.rules is not None
        return dataclasses.replace(found, rules=dataclasses.replace(found.rules, query_rows=None))

    monkeypatch.setattr("kvtide.serve.engine.find_rows", find)


def source_of(family: str, dtype: torch.dtype) -> OpenModel:
    """A small random model of a family, with the tokenizer of another: no text is compared."""
    return dataclasses.replace(tiny(), model=model_of(family, dtype))


def alone(source: OpenModel) -> list[tuple[object, ...]]:
    """The answers without any sharing."""
    engine = build(source, share_prefixes=False)
    requests = make_requests()
    run_all(engine, requests)
    assert not engine.stats.cached_tokens
    engine.close()
    return answers(requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_equals_the_computed_answer(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and the logits of each step are the same, with room for all and with little.

    Prompts are cut anywhere, so that hits end anywhere too.
    """
    source = source_of(family, dtype)
    expected = alone(source)
    for pool_tokens in (None, 150):
        with monkeypatch.context() as patch:
            cut_anywhere(patch, seed=pool_tokens or 0)
            engine, requests = build(source, pool_tokens=pool_tokens), make_requests()
            assert not engine._model.needs_whole_chunks
            poison_released(engine, patch)
            run_all(engine, requests)
        spared, retractions = engine.stats.cached_tokens, engine.stats.retractions
        engine.close()
        assert sum(spared.values()) > 0
        assert (retractions > 0) == (pool_tokens is not None)
        assert expected == answers(requests)


@pytest.mark.parametrize("on_pressure", ["offload", "recompute", "wait"])
@pytest.mark.parametrize("host_memory_bytes", [0, 1 << 16, 1 << 24])
def test_little_memory_changes_no_bit(
    on_pressure: str, host_memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are evicted, moved, brought back and lost while requests read others of them."""
    expected = alone(tiny())
    engine = build(
        tiny(), pool_tokens=120, on_pressure=on_pressure, host_memory_bytes=host_memory_bytes
    )
    requests = make_requests()
    dice = random.Random(host_memory_bytes)
    with monkeypatch.context() as patch:
        poison_released(engine, patch)
        for request in requests:
            engine.add(request)
        while engine.has_work:
            running = engine.scheduler.running
            if on_pressure != "wait" and running and dice.random() < 0.2:
                engine.scheduler.retract(dice.choice(running))
            engine.step()
    engine.close()
    assert expected == answers(requests)


@pytest.mark.usefixtures("whole_chunks")
def test_a_hit_of_whole_chunks_equals_the_computed_answer() -> None:
    """Where a cut of a prompt changes bits, whole chunks are shared, and the check says so."""
    expected = alone(tiny())
    engine, requests = build(tiny()), make_requests()
    run_all(engine, requests)
    assert engine.stats.cached_tokens["device"] % CHUNK == 0 < engine.stats.cached_tokens["device"]
    engine.close()
    assert expected == answers(requests)


@pytest.mark.usefixtures("whole_chunks")
def test_chunk_boundaries_depend_on_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that reads blocks computes the rest in the steps in which it would alone."""
    steps = {share: boundaries(monkeypatch, share=share) for share in (False, True)}
    assert all(steps[True][name] <= steps[False][name] for name in steps[True])
    assert steps[True] != steps[False]


def boundaries(monkeypatch: pytest.MonkeyPatch, *, share: bool) -> dict[str, set[tuple[int, int]]]:
    """For each request the steps that computed its tokens: the first token, and how many."""
    engine, requests = build(tiny(), share_prefixes=share), make_requests()
    found: dict[str, set[tuple[int, int]]] = {request.id: set() for request in requests}
    plan = engine.scheduler.plan

    def spy() -> list[tuple[Request, int]]:
        steps = plan()
        for request, count in steps:
            found[request.id].add((request.stored, count))
        return steps

    monkeypatch.setattr(engine.scheduler, "plan", spy)
    run_all(engine, requests)
    engine.close()
    return found


@pytest.mark.usefixtures("whole_chunks")
def test_sharing_less_than_a_chunk_would_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without blocks of positions an answer differs if a page is shared."""
    expected = alone(tiny())
    monkeypatch.setattr("kvtide.serve.engine.block_tokens_for", lambda *_, **__: 4)
    engine, requests = build(tiny()), make_requests()
    run_all(engine, requests)
    engine.close()
    assert expected != answers(requests)


def test_next_turn_starts_from_what_the_last_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fast mode answers are shared too, but for the last token, which has no KV yet."""
    monkeypatch.setattr("kvtide.serve.prefix._FEW_TOKENS", 64)
    engine = build(tiny(), exact=False)
    first = Request("a", [5] * 90, SamplingParams(60))
    run_all_but_keep(engine, first)
    second = Request("b", [*first.prompt_ids, *first.output_ids, 7, 8], SamplingParams(2))
    run_all_but_keep(engine, second)
    engine.close()
    assert (0, 149) == (first.cached_tokens, second.cached_tokens)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "GPTNeoX"])
@pytest.mark.parametrize("pool_tokens", [None, 80])
def test_conversations_compute_each_token_once(
    family: str, pool_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that go on, fork and are sent again, in chunks of any length, two at a time.

    Each answer has the bits that it has alone. What is computed is the least that can be, where the
    pool has room for all: tokens that no prompt before began with, and one last token.
    """
    monkeypatch.setattr("kvtide.serve.finder._WORTH_TOKENS", 1)
    source, dice = source_of(family, torch.float32), random.Random(1)
    shared = build(source, pool_tokens=pool_tokens)
    single = build(source, share_prefixes=False)
    cut_anywhere(monkeypatch, seed=2)
    poison_released(shared, monkeypatch)
    known: set[tuple[int, ...]] = set()
    histories = [[dice.randrange(4, 199) for _ in range(9)]]
    computed = least = 0
    for number in range(12):
        begin = dice.choice(histories[-3:])
        turns = [[*begin, *(dice.randrange(4, 199) for _ in range(dice.randint(0, 9)))]]
        turns.append([*begin, *turns[0][len(begin) : dice.choice([-1, 1000])]])
        pair = [Request(f"{number} {i}", ids, SamplingParams(4)) for i, ids in enumerate(turns)]
        for request in pair:
            least += least_of(request.prompt_ids, known)
        copies = [Request(request.id, request.prompt_ids, SamplingParams(4)) for request in pair]
        for request in pair:
            shared.add(request)
        while shared.has_work:
            shared.step()
        for copy in copies:
            run_all_but_keep(single, copy)
        assert answers(copies) == answers(pair)
        computed += sum(len(request.prompt_ids) - request.cached_tokens for request in pair)
        histories += [[*request.prompt_ids, *request.output_ids][:60] for request in pair]
    if pool_tokens is None:
        assert least == computed
    else:
        assert shared.stats.cached_tokens["host"] > 0
    assert_nothing_held(shared)
    for engine in (shared, single):
        engine.close()


def least_of(prompt: list[int], known: set[tuple[int, ...]]) -> int:
    """How many tokens of the prompt no prompt before it had there; the last one counts always."""
    counts = [count for count in range(len(prompt)) if tuple(prompt[:count]) in known]
    known.update(tuple(prompt[: count + 1]) for count in range(len(prompt)))
    return len(prompt) - max(counts, default=0)


def run_all_but_keep(engine: Engine, request: Request) -> None:
    """Answers a request, and keeps the blocks that it leaves."""
    engine.add(request)
    while engine.has_work:
        engine.step()


def test_tenants_share_nothing() -> None:
    """The second tenant's requests compute all that the first one's have computed."""
    engine = build(tiny())
    for salt, is_spared in ((b"one", False), (b"two", False), (b"one", True)):
        request = make_requests(salt=salt)[0]
        run_all_but_keep(engine, request)
        assert is_spared == (request.cached_tokens > 0)
    engine.close()


def test_damaged_block_is_a_miss() -> None:
    """A block whose bytes changed in host memory is computed again, to the same bits."""
    engine, prompt = build(tiny(), pool_tokens=120), [5] * 60
    request = Request("a", prompt, SamplingParams(3))
    run_all_but_keep(engine, request)
    run_all_but_keep(engine, Request("other", [6] * 100, SamplingParams(3)))
    below = list(engine.scheduler.prefixes.blocks.below.values())
    assert below
    for block in below:
        assert block.snapshot is not None
        block.snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
    again = Request("a", prompt, SamplingParams(3))
    run_all_but_keep(engine, again)
    assert engine.scheduler.prefixes.stats.failed > 0
    assert "host" not in engine.stats.cached_tokens
    engine.close()
    assert answers([request]) == answers([again])


def test_blocks_come_back_from_a_disk(tmp_path: Path) -> None:
    """Where host memory is full they go to the disk; a hit there gives the same bits."""
    expected = alone(tiny())
    options = {"pool_tokens": 120, "host_memory_bytes": 2 * BLOCK_BYTES}
    engine = build(tiny(), disk_dir=tmp_path / "kv", **options)
    for _ in range(2):
        requests = make_requests()
        for request in requests:
            run_all_but_keep(engine, request)
        assert expected == answers(requests)
    assert engine.stats.cached_tokens["disk"] > 0
    assert {"device", "host", "disk"} >= set(engine.stats.cached_tokens)
    assert 0 == engine.scheduler.prefixes.stats.failed
    engine.close()


def test_vanished_files_of_blocks_are_misses(tmp_path: Path) -> None:
    """The answers are computed, and have the same bits."""
    expected = alone(tiny())
    options = {"pool_tokens": 120, "host_memory_bytes": 2 * BLOCK_BYTES}
    engine = build(tiny(), disk_dir=tmp_path / "kv", **options)
    for _ in range(2):
        requests = make_requests()
        for request in requests:
            run_all_but_keep(engine, request)
            for path in list((tmp_path / "kv").glob("??/*.safetensors")):
                path.unlink(missing_ok=True)
        assert expected == answers(requests)
    assert engine.scheduler.prefixes.stats.failed > 0
    engine.close()


@pytest.mark.parametrize("steps", [16, 20, 24])
def test_a_later_engine_goes_on_with_requests_that_shared(tmp_path: Path, steps: int) -> None:
    """What is left of them on the disk is whole by itself, and leaves it with them."""
    expected = alone(tiny())
    first, ended = build(tiny(), pool_tokens=300, disk_dir=tmp_path / "kv"), []
    requests = make_named()
    for request in requests:
        first.add(request)
    for number in range(steps):
        ended += first.step()
        if number % 6 == 5 and first.scheduler.running:
            first.scheduler.retract(first.scheduler.running[0])
    assert sum(first.stats.cached_tokens.values()) > 0
    assert first.suspend() > 0
    first.close()
    done = {request.id: request for request in ended}
    second = build(tiny(), pool_tokens=300, disk_dir=tmp_path / "kv")
    left = [request for request in make_named() if request.id not in done]
    run_all(second, left)
    assert 0 == second.stats.recomputed_tokens
    assert second.stats.resumes > 0
    second.close()
    found = {request.id: request for request in [*ended, *left]}
    assert expected == answers([found[request.id] for request in requests])
    keys = [file.key for file in inspect_folder(tmp_path / "kv") if file.key is not None]
    assert all(map(is_shared, keys))


def make_named() -> list[Request]:
    """Makes the requests with keys, so that a later engine can go on with them."""
    requests = make_requests()
    for number, request in enumerate(requests):
        request.key = f"{number:032x}"
    return requests
