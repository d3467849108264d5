"""Log-probabilities of the model's own logits, the same whatever happens to a request."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.logprobs import LEAST_LOGPROB, step_logprobs, token_texts
from kvtide.serve.request import Request, SamplingParams, TokenLogprob
from serve.harness import check_rows_once, make_requests, run_all, tiny, token_bytes

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf])


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows_once(monkeypatch)


def text_of(token_id: int) -> str:
    """The text of a token, which is its number."""
    return str(token_id)


def _logprob(value: float) -> float:
    """Computes the logarithm of the softmax of `LOGITS` from its definition."""
    return value - math.log(sum(math.exp(x) for x in LOGITS.tolist()))


def test_chosen_and_likeliest_tokens_have_their_logprobs() -> None:
    """Equally likely tokens are sorted by id; the chosen token needn't be among the likeliest."""
    step = step_logprobs(LOGITS, 0, 3, text_of)
    assert (0, "0") == (step.chosen.token_id, step.chosen.text)
    assert step.chosen.logprob == pytest.approx(_logprob(1.0))
    assert [1, 3, 2] == [token.token_id for token in step.likeliest]
    assert [_logprob(x) for x in (3.0, 3.0, 2.0)] == pytest.approx(
        [token.logprob for token in step.likeliest]
    )


def test_no_likeliest_token_or_more_than_there_are_may_be_asked_for() -> None:
    """The answer has the chosen token alone, or all tokens."""
    assert () == step_logprobs(LOGITS, 0, 0, text_of).likeliest
    assert [1, 3, 2, 0, 4] == [
        token.token_id for token in step_logprobs(LOGITS, 0, 20, text_of).likeliest
    ]


def test_an_impossible_token_has_the_least_logprob() -> None:
    """JSON has no number for minus infinity."""
    assert TokenLogprob(4, "4", LEAST_LOGPROB) == step_logprobs(LOGITS, 4, 0, text_of).chosen


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_without_probabilities_are_an_error(value: float) -> None:
    """The error comes even if the chosen token is another."""
    with pytest.raises(ArithmeticError, match="give no probabilities"):
        step_logprobs(torch.tensor([value, 1.0]), 1, 0, text_of)


def test_bfloat16_logits_are_widened_first() -> None:
    """The softmax of bfloat16 itself has three digits."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = step_logprobs(logits.float(), 5, 3, text_of)
    assert wide == step_logprobs(logits, 5, 3, text_of)


def test_a_token_s_text_is_that_within_an_answer() -> None:
    """Special tokens have one; a part of a character has none."""
    tokenizer = tiny().tokenizer.backend_tokenizer
    find = token_texts(tokenizer)
    space, end = tokenizer.encode(" ").ids[0], tokenizer.token_to_id("<|im_end|>")
    assert (" ", "<|im_end|>") == (find(space), find(end))
    assert "\N{REPLACEMENT CHARACTER}" == find(tokenizer.encode("é").ids[0])


def test_a_token_s_text_keeps_the_space_that_a_decoder_drops_at_the_beginning() -> None:
    """The decoder of SentencePiece removes the space of the first token."""
    tokenizer = Tokenizer(models.WordLevel({"▁sea": 0, "s": 1}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    assert "sea" == tokenizer.decode([0])
    assert [" sea", "s"] == [token_texts(tokenizer)(number) for number in (0, 1)]


def _requests(seed: int) -> list[Request]:
    """Requests that ask for more or fewer log-probabilities, and one that asks for none."""
    requests = make_requests(seed)
    for number, request in enumerate(requests):
        values = {name: getattr(request.params, name) for name in request.params.__slots__}
        request.params = SamplingParams(**values | {"logprobs": (5, None, 5, 0)[number % 4]})
    return requests


def test_logprobs_are_the_same_after_a_retraction() -> None:
    """They are equal to the last bit, since they come from the same logits."""
    plenty, scarce = _requests(3), _requests(3)
    source = tiny("bfloat16")
    engine = Engine.build(source, EngineOptions(page_size=4, chunk_tokens=16), plenty)
    run_all(engine, plenty)
    engine.close()
    options = EngineOptions(kv_memory_bytes=96 * token_bytes(source), page_size=4, chunk_tokens=16)
    engine = Engine.build(source, options)
    run_all(engine, scarce)
    engine.close()
    assert any(request.retractions for request in scarce if request.params.logprobs == 5)
    assert [request.logprobs for request in plenty] == [request.logprobs for request in scarce]
    for request in plenty:
        steps = 0 if request.params.logprobs is None else len(request.output_ids)
        assert steps == len(request.logprobs)


def test_they_are_of_the_model_before_temperature() -> None:
    """A hot request and a greedy one see the same first step."""
    prompt = [5, 6, 7]
    greedy = Request("greedy", prompt, SamplingParams(1, logprobs=8))
    hot = Request("hot", prompt, SamplingParams(1, 2.0, 3, 0.9, seed=4, logprobs=8))
    engine = Engine.build(tiny(), EngineOptions(), [greedy, hot])
    run_all(engine, [greedy, hot])
    engine.close()
    assert greedy.logprobs[0].likeliest == hot.logprobs[0].likeliest
    assert greedy.logprobs[0].chosen == greedy.logprobs[0].likeliest[0]
    assert greedy.output_ids == [greedy.logprobs[0].chosen.token_id]
    assert hot.output_ids == [hot.logprobs[0].chosen.token_id]
