"""What a request computes next depends on the request alone."""

from __future__ import annotations

import pytest

from kvtide.errors import UsageError
from kvtide.serve.request import Request, SamplingParams
from serve.prefix_bench import CountedTokens


def test_tokens_cross_from_prompt_to_answer() -> None:
    """A range of tokens may lie in the prompt, in the answer, or in both."""
    request = Request("r", [1, 2, 3], output_ids=[4, 5])
    assert [2, 3] == request.tokens(1, 2)
    assert [3, 4] == request.tokens(2, 2)
    assert [5] == request.tokens(4, 1)
    assert [2, 3, 4, 5] == request.tokens(1, 9)
    assert [] == request.tokens(1, 0)


def test_tokens_copies_no_more_than_it_gives() -> None:
    """A long prompt is cut into many blocks: to copy its rest for each would take too long."""
    request = Request("r", CountedTokens(range(100)), output_ids=CountedTokens(range(50)))
    assert 8 == len(request.tokens(96, 8))
    assert 8 == len(request.tokens(10, 8))
    assert [12, 4] == [
        tokens.copied_count
        for tokens in (request.prompt_ids, request.output_ids)
        if isinstance(tokens, CountedTokens)
    ]


def test_replay_takes_tokens_of_the_answer_one_by_one() -> None:
    """The first time they were computed one by one, too."""
    request = Request("r", [1] * 10, output_ids=[2] * 5)
    counts = []
    while request.stored < request.token_count:
        counts.append(request.next_count(4, replay=True))
        request.stored += counts[-1]
    assert [4, 4, 2, 1, 1, 1, 1, 1] == counts


def test_without_replay_known_tokens_go_in_chunks() -> None:
    """This is faster, but the steps differ from those of the first time."""
    request = Request("r", [1] * 10, output_ids=[2] * 5)
    counts = []
    while request.stored < request.token_count:
        counts.append(request.next_count(4, replay=False))
        request.stored += counts[-1]
    assert [4, 4, 4, 3] == counts


def test_longest_does_not_count_the_last_token() -> None:
    """No token follows the last one, so nobody reads its KV."""
    assert Request("r", [1] * 10, SamplingParams(max_new_tokens=1)).longest == 10


def test_an_answer_ends_where_the_models_context_ends() -> None:
    """A prompt of 6 tokens leaves 2 of 8 positions, and the last new token needs none."""
    request = Request("r", [1] * 6, SamplingParams(max_new_tokens=1000))
    assert (1000, 1005) == (request.most_new_tokens, request.longest)
    request.context_limit = 8
    assert (3, 8) == (request.most_new_tokens, request.longest)
    short = Request("r", [1] * 6, SamplingParams(max_new_tokens=2), context_limit=8)
    assert (2, 7) == (short.most_new_tokens, short.longest)


def test_a_prompt_past_the_context_stays_too_long() -> None:
    """The request doesn't fit even with an answer of one token."""
    request = Request("r", [1] * 9, SamplingParams(max_new_tokens=5), context_limit=8)
    assert (1, 9) == (request.most_new_tokens, request.longest)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_invalid_parameters_are_refused(name: str, value: float) -> None:
    """The error names the parameter, before a request could reach a step with it."""
    with pytest.raises(UsageError, match=f"{name} is .*; it must be"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
