"""An ordinary server, with kvtide, under memory pressure: a real engine on the CPU.

Each engine is its own reference: it answers requests one after the other, when nothing is
retracted, and then all at once.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from colocated_case import make_model, requests, run_colocated
from engine_case import EngineRun

GREEDY = requests(6, 40)
PENALISED = requests(
    5, 34, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3
)  # fmt: skip
SAMPLED = requests(5, 34, temperature=1.0)
RANKED = [{**one, "priority": rank % 3, "return_logprob": False} for rank, one in enumerate(GREEDY)]
UNLUCKY = [*requests(2, 40), *requests(2, 36, "abort"), *requests(2, 36, "spoil")]
STEPS: list[tuple[str, Any]] = [
    *(("alone", GREEDY), ("generate", GREEDY)),
    *(("alone", PENALISED), ("generate", PENALISED)),
    ("sample", SAMPLED),
    ("generate", UNLUCKY),
    ("rest", 0.5),
    ("leave", requests(6, 80)),
]
ALONE, TOGETHER, ALONE_PENALISED, TOGETHER_PENALISED, FREE, UNLUCKILY = range(6)

SERVERS: dict[str, dict[str, Any]] = {
    "plain": {"disable_overlap_schedule": True, "disable_radix_cache": True},
    "overlap-radix": {"page_size": 4},
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few kilobytes."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module", params=SERVERS)
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineRun:
    """What each server made of all steps."""
    folder = tmp_path_factory.mktemp("served")
    return run_colocated(model, folder, STEPS, SERVERS[request.param])


def test_answers_are_those_of_a_server_that_retracts_nothing(served: EngineRun) -> None:
    """Token for token; the alone ones were never retracted, several of the others were."""
    assert [0] * len(GREEDY) == _retractions(served.results[ALONE])
    assert sum(_retractions(served.results[TOGETHER])) >= 5
    assert _tokens(served.results[ALONE]) == _tokens(served.results[TOGETHER])


@pytest.mark.parametrize("served", ["plain"], indirect=True)
def test_penalties_go_on_where_they_were(served: EngineRun) -> None:
    """Frequency, presence and repetition of all tokens since the request's beginning count.

    With overlapped scheduling SGLang counts by what else happens to run, so that two of its
    answers needn't be equal; see test_colocated_shelf for what kvtide counts then.
    """
    assert sum(_retractions(served.results[TOGETHER_PENALISED])) >= 4
    assert _tokens(served.results[ALONE_PENALISED]) == _tokens(served.results[TOGETHER_PENALISED])


def test_log_probabilities_are_given_for_each_token_once(served: EngineRun) -> None:
    """As many as tokens, those of the tokens, and as without retraction."""
    for alone, together in zip(served.results[ALONE], served.results[TOGETHER], strict=True):
        expected = alone["meta_info"]["output_token_logprobs"]
        actual = together["meta_info"]["output_token_logprobs"]
        assert together["output_ids"] == [token for _, token, *_ in actual]
        assert [value for value, *_ in expected] == pytest.approx(
            [value for value, *_ in actual], abs=1e-4
        )


def test_sampled_answers_are_the_models(served: EngineRun) -> None:
    """Each token was drawn with the probability that the model gives it after those before it."""
    answers, scores = served.results[FREE]["answers"], served.results[FREE]["scores"]
    assert sum(_retractions(answers)) >= 4
    for request, answer, score in zip(SAMPLED, answers, scores, strict=True):
        drawn = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        whole = [value for value, *_ in score["meta_info"]["input_token_logprobs"]]
        assert whole[len(request["input_ids"]) :] == pytest.approx(drawn, abs=1e-3)


def test_every_restore_is_exact(served: EngineRun) -> None:
    """Bytes are compared around each, in slots that held something else."""
    restores = served.events_of("restore")
    assert len(restores) >= 20
    assert [] == [event for event in restores if not event["exact"] or event["empty"]]
    assert any(event["moved"] for event in restores)


def test_nothing_is_computed_twice(served: EngineRun) -> None:
    """Each request is in one prefill only in each step that it is part of.

    But for those that SGLang retracts before it has the prefill's own token, or that were spoilt.
    """
    assert [] == served.events_of("refused")
    assert {"spoil"} == {event["rid"].rstrip("01") for event in served.events_of("failed")}
    steps = [GREEDY] * 2 + [PENALISED] * 2 + [SAMPLED, UNLUCKY]
    finished = Counter(one["rid"] for step in steps for one in step)
    prefills = Counter(rid for event in served.events_of("extend") for rid in event["rids"])
    reasons = "no token yet|chunk .* with checksum"
    again = Counter(
        re.findall(rf"request '(\S+)' will be computed again: (?:{reasons})", served.log)
    )
    for rid, count in finished.items():
        last_step = 1  # the one that the engine is shut down in may have begun it as well
        assert count <= prefills[rid] - again[rid] <= count + last_step


def test_a_request_may_be_aborted_while_it_is_in_the_arena(served: EngineRun) -> None:
    """It ends as aborted, its part of the arena is free at once, the others are answered."""
    aborts = served.events_of("abort")
    assert aborts
    assert all(event["after"] < event["before"] for event in aborts)
    answers = dict(zip([one["rid"] for one in UNLUCKY], served.results[UNLUCKILY], strict=True))
    for event in aborts:
        assert "abort" == answers[event["rid"]]["meta_info"]["finish_reason"]["type"]
    assert answers["r0"]["output_ids"] == served.results[ALONE][0]["output_ids"]


def test_damaged_kv_is_computed_again(served: EngineRun) -> None:
    """It is found before anything is written, the slots are given back, and the answer is right."""
    assert {"SnapshotDamaged"} == {event["why"] for event in served.events_of("failed")}
    answers = dict(zip([one["rid"] for one in UNLUCKY], served.results[UNLUCKILY], strict=True))
    for number in range(2):
        answer = answers[f"spoil{number}"]["output_ids"]
        assert served.results[ALONE][number]["output_ids"][: 36 + number] == answer


def test_nothing_is_left_behind(served: EngineRun) -> None:
    """Idle at last, all slots, rows and the whole arena are free; SGLang's own checks ran."""
    idle = served.events_of("idle")[-1]
    assert (idle["slots"], idle["rows"], 0) == (
        idle["slots_free"], idle["rows_free"], idle["arena_bytes"],
    )  # fmt: skip
    assert "leak" not in served.log


def test_without_restores_the_answers_differ(model: Path, tmp_path: Path) -> None:
    """The control: what the tests above look at does depend on restored KV."""
    outcome = run_colocated(
        model,
        tmp_path,
        [("alone", GREEDY), ("generate", GREEDY)],
        SERVERS["plain"],
        KVTIDE_WATCH_SKIP="1",
    )
    assert _tokens(outcome.results[0]) != _tokens(outcome.results[1])
    assert not any(event["exact"] for event in outcome.events_of("restore"))


@pytest.fixture(scope="module")
def crowded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Chunked prefills, mixed with decodes, and priorities; an arena with room for one request."""
    server = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
    return run_colocated(
        model,
        tmp_path_factory.mktemp("crowded"),
        [("alone", GREEDY), ("generate", GREEDY), ("generate", RANKED), ("rest", 0.5)],
        {**server, "enable_priority_scheduling": True},
        KVTIDE_HOST_MEMORY="64KiB",
    )


def test_what_the_arena_refuses_is_computed_again(crowded: EngineRun) -> None:
    """Some are saved, some are refused, and all are answered all the same."""
    assert {"ArenaFull"} == {event["why"] for event in crowded.events_of("refused")}
    assert crowded.events_of("restore")
    assert [] == [event for event in crowded.events_of("restore") if not event["exact"]]
    assert _tokens(crowded.results[0]) == _tokens(crowded.results[1])
    assert 0 == crowded.events_of("idle")[-1]["arena_bytes"]


def test_priorities_change_no_answer(crowded: EngineRun) -> None:
    """Whoever is let in first, and whoever is preempted for a better one."""
    assert sum(_retractions(crowded.results[2])) >= 4
    assert _tokens(crowded.results[0]) == _tokens(crowded.results[2])


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def _retractions(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["num_retractions"] for answer in answers]
