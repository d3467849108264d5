from __future__ import annotations

import pytest

from kvtide.cli.verify import compare_runs
from kvtide.serve.request import Request
from support.fake_serving import make_request


def _answered(request_id: str, tokens: list[int], digests: list[int]) -> Request:
    return make_request(
        request_id, output_ids=tokens, logit_digests=digests, finish_reason="length"
    )


def test_equal_runs_are_verified_with_the_count_of_what_was_compared() -> None:
    """The verdict counts the compared requests and steps."""
    runs = [[_answered("a", [1, 2], [11, 12]), _answered("b", [3], [13])] for _ in range(2)]
    verdict = compare_runs(*runs)
    assert verdict.verified
    assert "true (2 requests: all tokens, and the logits of 3 steps bit for bit" in str(verdict)


@pytest.mark.parametrize(
    ("tokens", "digests", "reason"),
    [
        ([1, 9, 3], [11, 19, 13], "step 1: token 9 instead of 2"),
        ([1, 2, 3], [11, 19, 13], "step 1: the right token 2, but from other logits"),
        ([1, 2], [11, 12], "step 2: 2 tokens instead of 3"),
        ([1, 2, 3, 4], [11, 12, 13, 14], "step 3: 4 tokens instead of 3"),
        ([], [], "step 0: 0 tokens instead of 3"),
    ],
)
def test_first_difference_is_named(tokens: list[int], digests: list[int], reason: str) -> None:
    """The reason names the request, the step, and whether token, logits or length differ."""
    constrained = [_answered("same", [7], [17]), _answered("b", tokens, digests)]
    unconstrained = [_answered("same", [7], [17]), _answered("b", [1, 2, 3], [11, 12, 13])]
    verdict = compare_runs(constrained, unconstrained)
    assert not verdict.verified
    assert f"request 'b', {reason}" == verdict.reason


def test_failure_in_the_large_pool_is_a_difference() -> None:
    """An answer is not verified if the reference run has no answer."""
    failed = make_request("a", finish_reason="error", error="no memory")
    verdict = compare_runs([_answered("a", [1], [11])], [failed])
    assert "false (request 'a', which failed in the pool that holds everything: no memory)" == str(
        verdict
    )


def test_nothing_to_compare_is_not_verified() -> None:
    """A run in which all requests failed proves nothing."""
    assert not compare_runs([], []).verified


def test_step_without_a_digest_is_our_mistake() -> None:
    """Two runs without digests don't count as equal."""
    with pytest.raises(AssertionError, match="has no digest"):
        compare_runs([_answered("a", [1], [])], [_answered("a", [1], [])])
