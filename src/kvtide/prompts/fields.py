"""Checks the values of a line of JSON. Errors name the line, the field, and what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from kvtide.errors import UsageError, shortened

LEAST_TEMPERATURE = 0.01
LARGEST_TEMPERATURE = 100.0


class FieldError(UsageError):
    """What is wrong at a place, such as a line of a file, and in which field of it.

    `field` is the field's name, such as `messages[0].role`; None where it is the whole object.
    """

    def __init__(self, where: str, what: str, field: str | None) -> None:
        super().__init__(where, what, field)
        self.where, self.what, self.field = where, what, field

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def decode(raw: bytes, where: str) -> str:
    """The text of one line."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(where, f"is not UTF-8 (byte {error.start + 1}: 0x{raw[error.start]:02x})")


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line."""
    try:
        value = json.loads(
            decode(raw, where),
            object_pairs_hook=_unique_keys,
            parse_constant=refuse_constant,
            parse_float=finite,
        )
    except json.JSONDecodeError as error:
        refuse(where, f"is not JSON: {error.msg} (column {error.colno})")
    except ValueError as error:
        refuse(where, f"is not usable JSON: {error}")
    except RecursionError:
        refuse(where, "is not usable JSON: it is nested too deeply")
    if not isinstance(value, dict):
        refuse(where, f"is {kind_of(value)}, not a JSON object {{...}}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {quote(twice)} appears twice")
    return fields


def refuse_constant(name: str) -> NoReturn:
    """Raises ValueError for a number that Python reads and JSON doesn't have, such as NaN."""
    raise ValueError(f"{name} is not a JSON number")


def finite(number: str) -> float:
    """A number of JSON. Raises ValueError for one that Python reads as infinite."""
    if math.isinf(value := float(number)):
        raise ValueError(f"{shortened(number, 20)} is larger than any number here")
    return value


def check_object(value: object, name: str, where: str) -> dict[str, Any]:
    """The value, which must be a JSON object."""
    if not isinstance(value, dict):
        refuse(where, f"'{name}' is {kind_of(value)}, not an object", name)
    return value


def check_list(value: object, name: str, where: str) -> list[Any]:
    """The value, which must be a list with something in it."""
    if not isinstance(value, list):
        refuse(where, f"'{name}' is {kind_of(value)}, not a list", name)
    if not value:
        refuse(where, f"'{name}' is empty", name)
    return value


def check_text(value: object, name: str, where: str, *, may_be_empty: bool = False) -> str:
    """The value, which must be a string of whole characters."""
    if not isinstance(value, str):
        refuse(where, f"'{name}' is {kind_of(value)}, not a string", name)
    if not value and not may_be_empty:
        refuse(where, f"'{name}' is empty", name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can contain half a surrogate pair (\ud800), which isn't a character.
        refuse(where, f"'{name}' has half a surrogate pair at character {error.start + 1}", name)
    return value


def check_whole_characters(value: object, name: str, where: str) -> None:
    """Refuses a value in which any string, however deep, has half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        refuse(where, f"'{name}' has half a surrogate pair", name)
    except RecursionError:
        refuse(where, f"'{name}' is nested too deeply", name)


def check_int(value: object, name: str, where: str, *, least: int, largest: int) -> int:
    """The value, which must be a whole number from `least` to `largest`."""
    # In Python a bool is an int, but true isn't a number of tokens.
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(where, f"'{name}' is {kind_of(value)}, not a whole number", name)
    if not least <= value <= largest:
        refuse(
            where,
            f"'{name}' is {shortened(str(value), 60)}; it must be from {least} to {largest}",
            name,
        )
    return value


def check_number(value: object, name: str, where: str) -> float:
    """The value, which must be a number; one that is too large for a float is infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(where, f"'{name}' is {kind_of(value)}, not a number", name)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_bool(value: object, name: str, where: str) -> bool:
    """The value, which must be true or false."""
    if not isinstance(value, bool):
        refuse(where, f"'{name}' is {kind_of(value)}, not true or false", name)
    return value


def check_temperature(value: float, *, name: str) -> float:
    """Returns the temperature if it is valid: 0 (greedy), or from 0.01 to 100.

    Raises UsageError otherwise. Logits divided by less than 0.01 can overflow, and then the
    probabilities are NaN.
    """
    # A NaN fails both comparisons.
    if not (value == 0 or LEAST_TEMPERATURE <= value <= LARGEST_TEMPERATURE):
        raise UsageError(
            f"{name} is {value}; it must be 0 (greedy) "
            f"or from {LEAST_TEMPERATURE} to {LARGEST_TEMPERATURE:g}"
        )
    return float(value)


def refuse_unknown_keys(
    fields: Mapping[str, object], known: tuple[str, ...], where: str, *, name: str = ""
) -> None:
    """Refuses a key that isn't among `known`: a misspelt one would silently have no effect."""
    for key in fields:
        if key not in known:
            has = f"{name} has an " if name else ""
            field = f"{name}.{key}" if name else key
            refuse(where, f"{has}unknown key {quote(key)}; known are {', '.join(known)}", field)


def kind_of(value: object) -> str:
    """What a JSON value is, in words; a short number is shown."""
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    kind = names.get(type(value), "null")
    return f"{kind} ({value})" if kind == "a number" and len(str(value)) < 40 else kind


def quote(text: str) -> str:
    """A text of the file as an error shows it."""
    return json.dumps(shortened(text, 60))


def refuse(where: str, what: str, field: str | None = None) -> NoReturn:
    """Raises FieldError, whose message begins with the line's place."""
    raise FieldError(where, what, field)
