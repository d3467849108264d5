"""An ordinary server with kvtide under memory pressure: a real engine on the CPU.

Each engine is its own reference: it answers requests one after the other, so that nothing is
retracted, and then all at once.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ordinary_case import (
    ADAPTERS,
    MODELS,
    Served,
    adapted,
    make_adapter,
    make_model,
    requests,
    run_ordinary,
)

GREEDY = requests(6, 40)
CONSTRAINED = requests(5, 30, "c", regex="the one grammar of on_cpu")
PENALISED = requests(
    5, 34, "p", frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3
)  # fmt: skip
SAMPLED = requests(5, 34, "s", temperature=1.0)
RANKED = [
    {**request, "priority": rank % 3, "return_logprob": False}
    for rank, request in enumerate(GREEDY)
]
RISING = [{**request, "priority": rank} for rank, request in enumerate(GREEDY)]
PROLONGED = requests(2, 40, "l")
"""They are so few that all of their KV stays in the prefix cache."""
UNLUCKY = [*requests(2, 40), *requests(2, 36, "abort"), *requests(2, 36, "spoil")]
STEPS: dict[str, tuple[str, Any]] = {
    "greedy alone": ("alone", GREEDY),
    "greedy": ("generate", GREEDY),
    "constrained alone": ("alone", CONSTRAINED),
    "constrained": ("generate", CONSTRAINED),
    "prolonged": ("prolong", PROLONGED),
    "unlucky": ("generate", UNLUCKY),
    "rest": ("rest", 0.5),
}
FURTHER_STEPS: dict[str, tuple[str, Any]] = {
    "penalised alone": ("alone", PENALISED),
    "penalised": ("generate", PENALISED),
    "sampled": ("sample", SAMPLED),
    "rest again": ("rest", 0.5),
    "leave": ("leave", requests(6, 80)),
}

SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"disable_overlap_schedule": True, "disable_radix_cache": True}),
    "overlap-radix": ("llama", {"page_size": 4}),
    "latents": ("latents", {}),
    "windows": ("windows", {"page_size": 4}),
    "windows-single": ("windows", {"disable_radix_cache": True}),
    "states": ("states", {"disable_radix_cache": True, "page_size": 4}),
    "states-radix": ("states", {}),
    "adapters": ("llama", {}),
}
"""By default steps overlap and prefixes are shared. SGLang shares no prefix of a recurrent state
while steps overlap."""
WHOLE = ("plain", "overlap-radix")
"""The servers that run the further steps, too."""
BARE_STEPS: dict[str, tuple[str, Any]] = {"bare": ("alone", requests(3, 40, "bare"))}
"""Steps of the server with LoRA adapters that use no adapter."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models of a few kilobytes each."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_model(folder / name, name)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module", params=SERVERS)
def served(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """Each server's answers to its steps."""
    model, server = SERVERS[request.param]
    steps = {**STEPS, **(FURTHER_STEPS if request.param in WHOLE else {})}
    if request.param == "adapters":
        server, steps = with_adapters(models, 3), {**_adapted(STEPS), **BARE_STEPS}
    return run_ordinary(models / model, tmp_path_factory.mktemp("served"), steps, server)


def with_adapters(models: Path, most: int) -> dict[str, Any]:
    """Returns a server's arguments for LoRA adapters; "no adapter" counts as one of `most`."""
    paths = {name: str(models / name) for name in ADAPTERS}
    return {"lora_paths": paths, "lora_backend": "torch_native", "max_loras_per_batch": most}


def _adapted(steps: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    return {
        name: (kind, adapted(given) if isinstance(given, list) else given)
        for name, (kind, given) in steps.items()
    }


def test_answers_equal_those_without_retraction(served: Served) -> None:
    """Every token is equal; requests alone were never retracted, and several of the others were."""
    assert [0] * len(GREEDY) == _retractions(served.answers["greedy alone"])
    assert sum(_retractions(served.answers["greedy"])) >= 5
    assert _tokens(served.answers["greedy alone"]) == _tokens(served.answers["greedy"])


@pytest.mark.parametrize("served", ["plain"], indirect=True)
def test_penalties_continue_after_a_retraction(served: Served) -> None:
    """Penalties of frequency, presence and repetition count all tokens since the beginning.

    With overlapped scheduling SGLang counts by what else happens to run, so that two of its answers
    needn't be equal; test_ordinary_shelf tests what kvtide counts then.
    """
    assert sum(_retractions(served.answers["penalised"])) >= 4
    assert _tokens(served.answers["penalised alone"]) == _tokens(served.answers["penalised"])


def test_grammars_continue_after_a_retraction(served: Served) -> None:
    """The grammar of on_cpu allows each token by its number in the answer."""
    answers = served.answers["constrained"]
    assert sum(_retractions(answers)) >= 4
    assert _tokens(served.answers["constrained alone"]) == _tokens(answers)
    for tokens in _tokens(answers):
        assert [number % 5 for number in range(len(tokens))] == [token % 5 for token in tokens]


def test_restored_kv_may_be_shared(served: Served) -> None:
    """Requests whose prompts are other requests' answers continue as these did."""
    answers, rests = served.answers["prolonged"]["answers"], served.answers["prolonged"]["rests"]
    assert sum(_retractions(answers)) >= 1
    wholes = zip(_tokens(answers), _tokens(rests), strict=True)
    assert all(_tokens(rests))
    assert [] == [(whole, rest) for whole, rest in wholes if whole[len(whole) // 2 :] != rest]


@pytest.mark.parametrize(
    "served", ["overlap-radix", "latents", "windows", "adapters"], indirect=True
)
def test_answers_are_in_the_prefix_cache(served: Served) -> None:
    """More tokens than the prompts' are cached, so restored KV is in the prefix cache."""
    cached = [rest["meta_info"]["cached_tokens"] for rest in served.answers["prolonged"]["rests"]]
    assert min(cached) > max(len(request["input_ids"]) for request in PROLONGED)


def test_log_probabilities_are_given_for_each_token_once(served: Served) -> None:
    """They belong to the tokens, and equal those without retraction."""
    pairs = zip(served.answers["greedy alone"], served.answers["greedy"], strict=True)
    for alone, together in pairs:
        expected = alone["meta_info"]["output_token_logprobs"]
        actual = together["meta_info"]["output_token_logprobs"]
        assert together["output_ids"] == [token for _, token, *_ in actual]
        assert [value for value, *_ in expected] == pytest.approx(
            [value for value, *_ in actual], abs=1e-4
        )


@pytest.mark.parametrize("served", WHOLE, indirect=True)
def test_sampled_answers_have_the_models_probabilities(served: Served) -> None:
    """Each token was drawn with the probability that the model gives it after the earlier ones."""
    answers, scores = served.answers["sampled"]["answers"], served.answers["sampled"]["scores"]
    assert sum(_retractions(answers)) >= 4
    for request, answer, score in zip(SAMPLED, answers, scores, strict=True):
        drawn = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        whole = [value for value, *_ in score["meta_info"]["input_token_logprobs"]]
        assert whole[len(request["input_ids"]) :] == pytest.approx(drawn, abs=1e-3)


def test_every_restore_is_exact(served: Served) -> None:
    """The watcher compares bytes around each restore, in slots that held something else."""
    restores = served.run.events_of("restore")
    assert len(restores) >= 20
    assert [] == [event for event in restores if not event["exact"] or event["empty"]]
    assert any(event["moved"] for event in restores)


def test_nothing_is_computed_twice(served: Served) -> None:
    """Each request is in only one prefill in each step that it is part of.

    Exceptions are requests that SGLang retracts before they have the prefill's own token, and those
    that were spoilt.
    """
    assert [] == served.run.events_of("refused")
    assert {"spoil"} == {event["rid"].rstrip("01") for event in served.run.events_of("failed")}
    asked = {**STEPS, **FURTHER_STEPS, **BARE_STEPS}
    steps = [(name, *asked[name]) for name in served.answers]
    runs = [asked for _, kind, asked in steps if kind in ("alone", "generate", "sample")]
    runs += [asked for _, kind, asked in steps if kind == "prolong" for _ in range(2)]
    finished = Counter(request["rid"] for asked in runs for request in asked)
    prefills = Counter(rid for event in served.run.events_of("extend") for rid in event["rids"])
    reasons = "no token yet|chunk .* with checksum"
    again = Counter(
        re.findall(rf"request '(\S+)' will be computed again: (?:{reasons})", served.run.log)
    )
    for rid, count in finished.items():
        last_step = 1  # the step in which the engine shuts down may have begun it, too
        assert count <= prefills[rid] - again[rid] <= count + last_step


def test_a_retracted_request_may_be_aborted(served: Served) -> None:
    """It ends as aborted, its part of the arena is free at once, and the others are answered."""
    aborts = served.run.events_of("abort")
    assert aborts
    assert all(event["after"] < event["before"] for event in aborts)
    answers = dict(
        zip([request["rid"] for request in UNLUCKY], served.answers["unlucky"], strict=True)
    )
    for event in aborts:
        assert "abort" == answers[event["rid"]]["meta_info"]["finish_reason"]["type"]
    assert answers["r0"]["output_ids"] == served.answers["greedy alone"][0]["output_ids"]


def test_damaged_kv_is_computed_again(served: Served) -> None:
    """The damage is found before anything is written, and the answer is right."""
    assert {"SnapshotDamaged"} == {event["why"] for event in served.run.events_of("failed")}
    answers = dict(
        zip([request["rid"] for request in UNLUCKY], served.answers["unlucky"], strict=True)
    )
    for number in range(2):
        answer = answers[f"spoil{number}"]["output_ids"]
        assert served.answers["greedy alone"][number]["output_ids"][: 36 + number] == answer


def test_nothing_is_left_behind(served: Served) -> None:
    """When the server is idle, slots, rows and the arena are free; SGLang checks it, too."""
    idle = served.run.events_of("idle")[-1]
    for kind in ("slots", "rows", "window_slots", "states"):
        assert idle[kind] == idle[f"{kind}_free"]
    assert 0 == idle["arena_bytes"]
    assert "leak" not in served.run.log


def test_sglang_warns_of_no_hook(served: Served) -> None:
    """It would warn of two hooks around a function, once in each of its processes."""
    assert [] == served.run.log_lines("Multiple", "hooks on")


@pytest.mark.parametrize("served", ["adapters"], indirect=True)
def test_adapters_change_the_answers(served: Served) -> None:
    """A control: prompts get other answers with an adapter; the first is asked without one."""
    adapted_answers = _tokens(served.answers["greedy alone"])[:3]
    pairs = zip(adapted_answers, _tokens(served.answers["bare"]), strict=True)
    assert [True, False, False] == [answer == other for answer, other in pairs]


@pytest.mark.parametrize("name", ["plain", "states"])
def test_without_restores_the_answers_differ(name: str, models: Path, tmp_path: Path) -> None:
    """A control: the answers of the tests above depend on restored KV or state."""
    model, server = SERVERS[name]
    steps = {step: STEPS[step] for step in ("greedy alone", "greedy")}
    outcome = run_ordinary(models / model, tmp_path, steps, server, KVTIDE_WATCH_SKIP="1")
    assert _tokens(outcome.answers["greedy alone"]) != _tokens(outcome.answers["greedy"])
    # A request that came back with poison may be saved with it, and come back "exact" later.
    restores = outcome.run.events_of("restore")
    first = {event["rid"]: event["exact"] for event in reversed(restores)}
    assert first
    assert not any(first.values())


@pytest.fixture(scope="module", params=["llama", "states", "adapters"])
def crowded(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """Servers with priorities and with an arena that has room for one request.

    One has chunked prefills, mixed with decodes. One has adapters and drains: there are two places
    for three adapters, and a better request's adapter takes the place of one in the arena.
    """
    servers: dict[str, dict[str, Any]] = {
        "llama": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
        "states": {"disable_radix_cache": True},
        "adapters": {**with_adapters(models, 2), "lora_drain_wait_threshold": 0.01},
    }
    steps: dict[str, tuple[str, Any]] = {
        **{step: STEPS[step] for step in ("greedy alone", "greedy")},
        "ranked": ("generate", RANKED),
        "rest": STEPS["rest"],
    }
    is_adapted = request.param == "adapters"
    if is_adapted:
        del steps["greedy"]
        steps["ranked"] = ("generate", RISING)
    return run_ordinary(
        models / ("llama" if is_adapted else request.param),
        tmp_path_factory.mktemp("crowded"),
        _adapted(steps) if is_adapted else steps,
        {**servers[request.param], "enable_priority_scheduling": True},
        KVTIDE_HOST_MEMORY="64KiB" if request.param == "llama" else "16MiB",
    )


@pytest.mark.parametrize("crowded", ["llama"], indirect=True)
def test_requests_that_the_arena_refuses_are_computed_again(crowded: Served) -> None:
    """Some requests are saved and some are refused, and all get their answers."""
    assert {"ArenaFull"} == {event["why"] for event in crowded.run.events_of("refused")}
    assert crowded.run.events_of("restore")
    assert [] == [event for event in crowded.run.events_of("restore") if not event["exact"]]
    assert _tokens(crowded.answers["greedy alone"]) == _tokens(crowded.answers["greedy"])
    assert 0 == crowded.run.events_of("idle")[-1]["arena_bytes"]


def test_priorities_change_no_answer(crowded: Served) -> None:
    """The order in which requests are let in or preempted doesn't matter."""
    assert sum(_retractions(crowded.answers["ranked"])) >= 4
    assert _tokens(crowded.answers["greedy alone"]) == _tokens(crowded.answers["ranked"])
    assert crowded.run.events_of("restore")
    assert [] == [event for event in crowded.run.events_of("restore") if not event["exact"]]


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def _retractions(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["num_retractions"] for answer in answers]
