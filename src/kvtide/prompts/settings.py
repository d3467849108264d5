"""Reads the settings of sampling that a line may have, as fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvtide.errors import UsageError
from kvtide.prompts.fields import (
    check_int,
    check_number,
    check_temperature,
    check_text,
    kind_of,
    refuse,
)

LARGEST_SEED = 2**63 - 1
LARGEST_NEW_TOKENS = 1_000_000
LARGEST_TOP_K = 2**31 - 1
MOST_SAMPLES = 128
MOST_LOGPROBS = 20
_MOST_STOPS, _LONGEST_STOP = 64, 1000

Check = Callable[[object, str, str], Any]
"""Checks a value, given the field's name and the line's place; returns it as it is used."""


def whole(least: int, largest: int) -> Check:
    """A check for a whole number from `least` to `largest`."""
    return lambda value, name, where: check_int(value, name, where, least=least, largest=largest)


def _temperature(value: object, name: str, where: str) -> float:
    number = check_number(value, name, where)
    try:
        return check_temperature(number, name=f"'{name}'")
    except UsageError as error:
        refuse(where, str(error), name)


def _top_p(value: object, name: str, where: str) -> float:
    number = check_number(value, name, where)
    if not 0 < number <= 1:
        refuse(where, f"'{name}' is {number}; it must be above 0 and at most 1", name)
    return number


def _stop(value: object, name: str, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_stop_string(value, name, where),)
    if not isinstance(value, list):
        refuse(where, f"'{name}' is {kind_of(value)}, not a string or a list of strings", name)
    if len(value) > _MOST_STOPS:
        refuse(
            where, f"'{name}' has {len(value)} strings; it must have at most {_MOST_STOPS}", name
        )
    return tuple(_stop_string(word, f"{name}[{n}]", where) for n, word in enumerate(value))


def _stop_string(value: object, name: str, where: str) -> str:
    word = check_text(value, name, where)
    if len(word) > _LONGEST_STOP:
        said = f"'{name}' has {len(word)} characters; it must have at most {_LONGEST_STOP}"
        refuse(where, said, name)
    return word


NEW_TOKENS = whole(1, LARGEST_NEW_TOKENS)
SAMPLES = whole(1, MOST_SAMPLES)
LOGPROBS = whole(0, MOST_LOGPROBS)
COMMON: Mapping[str, tuple[str, Check]] = {
    "max_tokens": ("max_new_tokens", NEW_TOKENS),
    "temperature": ("temperature", _temperature),
    "top_p": ("top_p", _top_p),
    "top_k": ("top_k", whole(0, LARGEST_TOP_K)),
    "seed": ("seed", whole(0, LARGEST_SEED)),
    "stop": ("stop", _stop),
}
"""For each key that every format has: the field of SamplingParams, and the check."""


def read_settings(
    fields: Mapping[str, object],
    known: Mapping[str, tuple[str, Check]],
    where: str,
    *,
    prefix: str = "",
) -> dict[str, Any]:
    """The settings in `fields`, of the keys in `known`. Null is as if absent.

    `prefix` stands before the keys in errors. Two keys for one setting are refused.
    """
    settings: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, (setting, check) in known.items():
        if fields.get(key) is None:
            continue
        if setting in keys:
            said = f"has both '{prefix}{keys[setting]}' and '{prefix}{key}'; keep one"
            refuse(where, said, f"{prefix}{key}")
        keys[setting] = key
        settings[setting] = check(fields[key], f"{prefix}{key}", where)
    return settings


def read_sample_count(fields: Mapping[str, object], where: str, *, prefix: str = "") -> int | None:
    """How many answers the line asks for (`n`); None if it doesn't say."""
    value = fields.get("n")
    return None if value is None else int(SAMPLES(value, f"{prefix}n", where))
