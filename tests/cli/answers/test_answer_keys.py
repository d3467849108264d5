from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtide.cli.answers.keys import Conditions
from kvtide.serve.request import Request, SamplingParams

CHANCE = SamplingParams(max_new_tokens=4, temperature=0.5, top_k=5, top_p=0.5, seed=1, stop=("x",))
CONDITIONS = Conditions("name", "hash", {"exact": True, "dtype": "float32"}, CHANCE)


def _key(
    conditions: Conditions = CONDITIONS,
    ids: tuple[int, ...] = (1, 2),
    form: str = "plain",
    **changed: Any,
) -> str:
    return conditions.key([Request("a", list(ids), replace(CHANCE, **changed))], form)


def test_a_key_is_32_hex_digits_and_stays() -> None:
    """It is on disks: another key for the same answer would have it computed again."""
    assert "8ffeeb09e147ed2d290e8cc80ea9e08c" == _key()


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 5},
        {"temperature": 0.25},
        {"top_k": 6},
        {"top_p": 0.25},
        {"seed": 2},
        {"stop": ()},
        {"logprobs": 0},
        {"form": "openai"},
        {"ids": (1, 3)},
        {"ids": (1, 2, 3)},
        {"conditions": replace(CONDITIONS, model_hash="other")},
        {"conditions": replace(CONDITIONS, settings={"exact": False, "dtype": "float32"})},
    ],
)
def test_whatever_decides_an_answer_changes_its_key(change: dict[str, Any]) -> None:
    """Prompt, sampling, the model's files and the run's settings."""
    assert _key() != _key(**change)


def test_what_decides_nothing_changes_no_key() -> None:
    """The model's name, the id, and chance where the likeliest token is always taken."""
    assert _key() == _key(replace(CONDITIONS, model="a copy of it"))
    assert CONDITIONS.key([Request("b", [1, 2], CHANCE)], "plain") == _key()
    assert _key(temperature=0.0) == _key(temperature=0.0, seed=2, top_k=7, top_p=1.0)


def test_the_number_of_samples_decides() -> None:
    """One answer isn't two."""
    request = Request("a", [1, 2], CHANCE)
    assert CONDITIONS.key([request], "plain") != CONDITIONS.key([request, request], "plain")


def test_a_header_names_every_setting() -> None:
    """The header has the settings of sampling too, so that each can be named if it differs."""
    header = CONDITIONS.header()
    assert "name" == header["model"]
    assert {"model_hash": "hash", "exact": True, "temperature": 0.5, "stop": ("x",)}.items() <= (
        header["settings"].items()
    )
