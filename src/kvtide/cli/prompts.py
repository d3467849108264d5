"""Reads a file of prompts: one JSON object per line. Errors name the line.

A line is `{"id": "a", "prompt": "..."}` or `{"id": "b", "messages": [{"role": "user",
"content": "..."}]}`. It may set `max_new_tokens`, `temperature` and `seed` for its request. Blank
lines are skipped. An unknown key is refused: a misspelt setting would silently have no effect.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvtide.errors import UsageError, shortened

ROLES = ("system", "user", "assistant")
KEYS = ("id", "prompt", "messages", "max_new_tokens", "temperature", "seed")
LEAST_TEMPERATURE = 0.01
LARGEST_TEMPERATURE = 100.0
LARGEST_SEED = 2**63 - 1
LARGEST_NEW_TOKENS = 1_000_000


@dataclass(frozen=True)
class Prompt:
    """One line of the file. For a field that is None the command's option holds."""

    where: str
    """File and line, for errors: `prompts.jsonl, line 3`."""
    id: str
    messages: tuple[dict[str, str], ...]
    """The conversation. A plain `prompt` is one message of the user."""
    is_chat: bool
    """Whether the line has `messages`, which only a model with a chat template can answer."""
    max_new_tokens: int | None
    temperature: float | None
    seed: int | None


def read_prompts(source: str) -> list[Prompt]:
    """Reads all prompts from the file `source`, or from standard input if it is `-`.

    Raises UsageError for the first error, with the file and the line.
    """
    name = "standard input" if source == "-" else source
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, raw in enumerate(_read_bytes(source).split(b"\n"), start=1):
        if not raw.strip():
            continue
        prompt = parse_prompt(raw, where=f"{name}, line {number}")
        if prompt.id in lines:
            _refuse(prompt.where, f"id {_quote(prompt.id)} was used in line {lines[prompt.id]}")
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f'{name} has no prompts; write one {{"id": ..., "prompt": ...}} a line')
    return prompts


def single_prompt(text: str) -> Prompt:
    """The prompt of `--prompt`, as the only line of a file. Raises UsageError for an empty text."""
    content = _check_text(text, "prompt", "--prompt")
    return Prompt(
        where="--prompt",
        id="1",
        messages=({"role": "user", "content": content},),
        is_chat=False,
        max_new_tokens=None,
        temperature=None,
        seed=None,
    )


def parse_prompt(raw: bytes, *, where: str) -> Prompt:
    """Parses one line. Raises UsageError, whose message begins with `where`."""
    fields = _parse_object(raw, where)
    for key in fields:
        if key not in KEYS:
            _refuse(where, f"unknown key {_quote(key)}; known are {', '.join(KEYS)}")
    if "id" not in fields:
        _refuse(where, "lacks an 'id', a string that no other line has")
    if "prompt" in fields and "messages" in fields:
        _refuse(where, "has both 'prompt' and 'messages'; keep one")
    if "prompt" not in fields and "messages" not in fields:
        _refuse(where, "lacks a 'prompt' or 'messages'")
    is_chat = "messages" in fields
    if is_chat:
        messages = _check_messages(fields["messages"], where)
    else:
        content = _check_text(fields["prompt"], "prompt", where)
        messages = ({"role": "user", "content": content},)
    return Prompt(
        where=where,
        id=_check_text(fields["id"], "id", where),
        messages=messages,
        is_chat=is_chat,
        max_new_tokens=_check_optional_int(fields, "max_new_tokens", 1, LARGEST_NEW_TOKENS, where),
        temperature=_check_optional_temperature(fields, where),
        seed=_check_optional_int(fields, "seed", 0, LARGEST_SEED, where),
    )


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


def _read_bytes(source: str) -> bytes:
    if source == "-" and sys.stdin is None:
        raise UsageError("cannot read prompts from -: standard input is closed; name a file")
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except (OSError, ValueError) as error:
        # ValueError: the path has a NUL byte.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read prompts from {source}: {reason}") from error
    return raw.removeprefix(b"\xef\xbb\xbf")


def _parse_object(raw: bytes, where: str) -> dict[str, object]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(where, f"is not UTF-8 (byte {error.start + 1}: 0x{raw[error.start]:02x})")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _refuse(where, f"is not JSON: {error.msg} (column {error.colno})")
    except ValueError as error:
        _refuse(where, f"is not usable JSON: {error}")
    except RecursionError:
        _refuse(where, "is not usable JSON: it is nested too deeply")
    if not isinstance(value, dict):
        _refuse(where, f"is {_kind(value)}, not a JSON object {{...}}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {_quote(twice)} appears twice")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_messages(value: object, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        _refuse(where, f"'messages' is {_kind(value)}, not a list")
    if not value:
        _refuse(where, "'messages' is empty")
    return tuple(
        _check_message(message, f"messages[{index}]", where) for index, message in enumerate(value)
    )


def _check_message(value: object, name: str, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse(where, f"{name} is {_kind(value)}, not an object with 'role' and 'content'")
    for key in ("role", "content"):
        if key not in value:
            _refuse(where, f"{name} lacks a {key!r}")
    for key in value:
        if key not in ("role", "content"):
            _refuse(where, f"{name} has an unknown key {_quote(key)}; known are role, content")
    role = _check_text(value["role"], f"{name}.role", where)
    if role not in ROLES:
        _refuse(where, f"{name}.role is {_quote(role)}; known are {', '.join(ROLES)}")
    return {"role": role, "content": _check_text(value["content"], f"{name}.content", where)}


def _check_text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        _refuse(where, f"'{name}' is {_kind(value)}, not a string")
    if not value:
        _refuse(where, f"'{name}' is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can contain half a surrogate pair (\ud800), which isn't a character.
        _refuse(where, f"'{name}' has half a surrogate pair at character {error.start + 1}")
    return value


def _check_optional_int(
    fields: dict[str, object], name: str, least: int, largest: int, where: str
) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    # In Python a bool is an int, but true isn't a number of tokens.
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(where, f"'{name}' is {_kind(value)}, not a whole number")
    if not least <= value <= largest:
        _refuse(
            where, f"'{name}' is {shortened(str(value), 60)}; it must be from {least} to {largest}"
        )
    return value


def _check_optional_temperature(fields: dict[str, object], where: str) -> float | None:
    value = fields.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(where, f"'temperature' is {_kind(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return check_temperature(number, name=f"{where}: 'temperature'")


def _kind(value: object) -> str:
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


def _quote(text: str) -> str:
    return json.dumps(shortened(text, 60))


def _refuse(where: str, what: str) -> NoReturn:
    raise UsageError(f"{where}: {what}")
