from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.cli.verify import KeptLine, compare_runs, reference_options, reference_requests
from kvtide.serve.options import EngineOptions
from kvtide.serve.request import Request
from kvtide.tier import MooncakeSettings
from support.fake_serving import make_request


def _answered(request_id: str, tokens: list[int], digests: list[int]) -> Request:
    return make_request(
        request_id, output_ids=tokens, logit_digests=digests, finish_reason="length"
    )


def test_equal_runs_are_verified_with_the_count_of_what_was_compared() -> None:
    """The verdict counts the compared requests and steps."""
    runs = [[_answered("a", [1, 2], [11, 12]), _answered("b", [3], [13])] for _ in range(2)]
    verdict = compare_runs(runs[0], runs[1])
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


def test_an_end_that_the_other_run_does_not_have_is_a_difference() -> None:
    """The other run gets no more tokens than the answer has, so its end shows as a length."""
    runs = [[_answered("a", [1, 2], [11, 12])] for _ in range(2)]
    runs[0][0].finish_reason = "stop"
    assert (
        "request 'a', step 2: the end is 'stop', not 'length'"
        == compare_runs(runs[0], runs[1]).reason
    )


def test_failure_in_the_reference_run_is_a_difference() -> None:
    """An answer is not verified if the reference run has no answer."""
    failed = make_request("a", finish_reason="error", error="no memory")
    verdict = compare_runs([_answered("a", [1], [11])], [failed])
    expected = "false (request 'a', which failed in the run without retractions: no memory)"
    assert expected == str(verdict)


def test_a_reference_run_with_retractions_is_our_mistake() -> None:
    """Nothing can be verified by a run that retracted something itself."""
    runs = [[_answered("a", [1], [11])] for _ in range(2)]
    runs[1][0].retractions = 1
    with pytest.raises(AssertionError, match="had retractions"):
        compare_runs(runs[0], runs[1])


def test_reference_requests_need_no_more_room_than_the_answers() -> None:
    """An answer that ended by itself is short; one that ended by its length keeps its parameters.

    So the reference run shows it if an answer ended before its length.
    """
    stopped, full = make_request("a", output_ids=[5, 6]), make_request("b", output_ids=[5, 6])
    stopped.finish_reason, full.finish_reason = "stop", "length"
    references = reference_requests([stopped, full])
    assert [("a", 2), ("b", 64)] == [(r.id, r.params.max_new_tokens) for r in references]
    assert [4, 66] == [request.longest for request in references]
    assert [[], []] == [request.output_ids for request in references]


def test_nothing_is_retracted_in_the_reference_run() -> None:
    """Requests wait, and no KV comes from a tier or from others; the rest is as in run one."""
    memory = EngineOptions(1, 2, Path("kv"), 3, MooncakeSettings("a:1"))
    first = replace(memory, exact=False, chunk_tokens=7)
    expected = EngineOptions(
        host_memory_bytes=0,
        exact=False,
        chunk_tokens=7,
        on_pressure="wait",
        keep_logits=True,
        share_prefixes=False,
    )
    assert expected == reference_options(replace(first, keep_logits=True))


def _line(**fields: object) -> dict[str, object]:
    return {"id": "a", "text": "x", "token_ids": [1], "retractions": 0, **fields}


def test_lines_of_earlier_runs_are_compared_without_their_logits() -> None:
    """The verdict says what couldn't be compared. Retractions, hits and keys may differ."""
    kept = KeptLine("a", _line(retractions=3, cached_tokens=8, key="0f"), _line())
    verdict = compare_runs([], [], [kept])
    assert verdict.verified
    assert "1 answer of earlier runs" in verdict.reason
    assert "no logits of theirs are left" in verdict.reason
    samples = KeptLine(
        "a", {"id": "a", "samples": [_line(retractions=1)]}, {"id": "a", "samples": [_line()]}
    )
    assert compare_runs([], [], [samples]).verified


def test_a_model_may_have_another_name_in_an_earlier_batch_line() -> None:
    """The line's key tells the model; `./smollm2` and `smollm2` may be the same."""

    def line(model: str, text: str) -> dict[str, object]:
        return {"custom_id": "a", "response": {"body": {"model": model, "choices": [text]}}}

    assert compare_runs([], [], [KeptLine("a", line("./m", "x"), line("m", "x"))]).verified
    assert not compare_runs([], [], [KeptLine("a", line("m", "y"), line("m", "x"))]).verified
    for hostile in (7, {"body": 7}, {"body": {"model": "m"}}):
        kept = KeptLine("a", {"custom_id": "a", "response": hostile}, line("m", "x"))
        assert not compare_runs([], [], [kept]).verified


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (_line(token_ids=[2]), "token_ids"),
        (_line(text="y"), "text"),
        (_line(more=1), "more"),
        ({"id": "a", "text": "x"}, "token_ids"),
        ({"id": "a", "samples": 7, "text": "x", "token_ids": [1]}, "samples"),
        ({"id": "a", "samples": [7], "text": "x", "token_ids": [1]}, "samples"),
    ],
)
def test_a_line_that_differs_is_named(line: dict[str, object], field: str) -> None:
    """A line is read from a file, so it may hold anything."""
    both = [_answered("b", [1], [11])]
    verdict = compare_runs(both, both, [KeptLine("a", line, _line())])
    assert not verdict.verified
    assert f"request 'a', an answer of an earlier run: its {field!r} is not that" in verdict.reason


def test_nothing_to_compare_is_not_verified() -> None:
    """A run in which all requests failed proves nothing."""
    assert not compare_runs([], []).verified


def test_step_without_a_digest_is_our_mistake() -> None:
    """Two runs without digests don't count as equal."""
    with pytest.raises(AssertionError, match="has no digest"):
        compare_runs([_answered("a", [1], [])], [_answered("a", [1], [])])
