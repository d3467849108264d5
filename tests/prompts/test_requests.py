from __future__ import annotations

import json

from kvtide.prompts import Prompt, parse_prompt
from kvtide.prompts.requests import requests_of
from kvtide.serve.request import SamplingParams

WARM = SamplingParams(temperature=1.0, seed=7)


def _prompt(place: int = 0, **fields: object) -> Prompt:
    line = json.dumps({"id": "a", "prompt": "x", **fields}).encode()
    prompt = parse_prompt(line, where="f, line 1")
    return Prompt(**(vars(prompt) | {"place": place}))


def _seeds(prompt: Prompt, sample_count: int = 1) -> list[int]:
    return [request.params.seed for request in requests_of(prompt, [5], WARM, sample_count)]


def test_settings_of_the_line_win() -> None:
    """The run's settings hold for everything that the line leaves out."""
    (request,) = requests_of(_prompt(top_k=3, stop="END"), [5, 6], WARM, 1)
    found = request.params
    assert ("a", [5, 6]) == (request.id, request.prompt_ids)
    assert (3, ("END",), 1.0, 64) == (
        found.top_k,
        found.stop,
        found.temperature,
        found.max_new_tokens,
    )


def test_there_is_a_request_for_each_sample() -> None:
    """The line says how many there are, or else the run; all have the same prompt."""
    requests = requests_of(_prompt(n=3), [5], WARM, 2)
    assert ["a", "a#1", "a#2"] == [request.id for request in requests]
    assert [[5]] * 3 == [request.prompt_ids for request in requests]
    assert ["a", "a#1"] == [request.id for request in requests_of(_prompt(), [5], WARM, 2)]


def test_equal_prompts_get_different_seeds() -> None:
    """Each sample of each prompt has another seed, and the next run has the same seeds."""
    seeds = _seeds(_prompt(0), 2) + _seeds(_prompt(1), 2)
    assert 4 == len(set(seeds))
    assert seeds == _seeds(_prompt(0), 2) + _seeds(_prompt(1), 2)


def test_a_seed_of_the_line_is_taken_as_it_is() -> None:
    """Lines with equal seeds get equal answers, sample by sample, wherever they stand."""
    first, second = _seeds(_prompt(0, seed=9), 3), _seeds(_prompt(1, seed=9), 3)
    assert 9 == first[0]
    assert first == second
    assert 3 == len(set(first))
