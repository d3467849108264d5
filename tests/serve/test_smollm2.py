"""The promise holds for a real model, SmolLM2-135M-Instruct, as `make demo` runs it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import Request, SamplingParams
from serve.harness import answers, check_rows_once, poison_released, run_all, token_bytes

pytestmark = pytest.mark.smollm2

QUESTIONS = (
    "What is the capital of France?",
    "Write two lines about the sea.",
    "List five animals that live in Africa.",
    "def fibonacci(n):",
    "Who wrote Hamlet, and when? " * 6,
    "Translate 'good morning' to Spanish, French and German.",
)
NEW_TOKENS = 10
POOL_TOKENS = 120


@functools.cache
def smollm2(dtype: str) -> OpenModel:
    """Returns the model, which is loaded once for each dtype."""
    return open_model("smollm2", dtype=dtype)


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_requests(source: OpenModel) -> list[Request]:
    """Puts the questions into the chat template; every other request samples."""
    requests = []
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        text = source.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        prompt_ids = source.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        params = SamplingParams(NEW_TOKENS, temperature=0.8 * (number % 2), seed=number)
        requests.append(Request(f"q{number}", prompt_ids, params))
    return requests


@pytest.mark.parametrize(
    ("threads", "dtype"), [(1, "bfloat16"), (2, "float32")], indirect=["threads"]
)
def test_constrained_equals_unconstrained_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, threads: int, dtype: str
) -> None:
    """Tokens, text and logits of every step are equal, with NaN in all freed slots."""
    source = smollm2(dtype)
    plenty, scarce = make_requests(source), make_requests(source)
    options = EngineOptions(page_size=4, chunk_tokens=64, keep_logits=True)
    engine = Engine.build(source, options, plenty)
    run_all(engine, plenty)
    engine.close()

    kv_memory_bytes = POOL_TOKENS * token_bytes(source)
    options = EngineOptions(
        kv_memory_bytes=kv_memory_bytes, page_size=4, chunk_tokens=64, keep_logits=True
    )
    engine = Engine.build(source, options)
    assert torch.get_num_threads() == threads
    with monkeypatch.context() as patch:
        poison_released(engine, patch)
        run_all(engine, scarce)
    stats = engine.stats
    engine.close()
    assert stats.retractions >= 1
    assert stats.restored_bytes > 0
    assert answers(plenty) == answers(scarce)


def test_float32_tokens_equal_those_of_generate() -> None:
    """transformers answers each request alone and greedily; the engine gives the same tokens."""
    source = smollm2("float32")
    requests = make_requests(source)
    for request in requests:
        request.params = SamplingParams(NEW_TOKENS)
    expected = []
    for request in requests:
        output = source.model.generate(
            torch.tensor([request.prompt_ids]),
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        expected.append(output[0, len(request.prompt_ids) :].tolist())
    engine = Engine.build(source, EngineOptions(chunk_tokens=64), requests)
    run_all(engine, requests)
    engine.close()
    assert expected == [request.output_ids for request in requests]
