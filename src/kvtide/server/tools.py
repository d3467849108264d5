"""Calls of tools in an answer's text, where the model's chat template has a form that is known.

Known is the form that Qwen's and Hermes' templates teach: `<tool_call>`, a JSON object with `name`
and `arguments`, `</tool_call>`, once for each call, after the text if there is any.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, final

BEGIN, END = "<tool_call>", "</tool_call>"


def are_known(chat_template: str) -> bool:
    """Whether a chat template has the known form."""
    return BEGIN in chat_template


@final
@dataclass(frozen=True)
class CalledTools:
    """What a text says: its content, and the calls of tools that are complete in it."""

    content: str
    calls: tuple[dict[str, str], ...]
    """`name`, and `arguments` as JSON, of each call."""


def read_calls(text: str, *, has_ended: bool) -> CalledTools:
    """Reads the text of an answer as far as it is.

    What may still become a call isn't in the content yet. A call that can't be read, and all that
    follows it, is content: nothing of an answer is lost.
    """
    begin = text.find(BEGIN)
    if begin < 0:
        content = text if has_ended else text[: settled_length(text)]
        return CalledTools(content, ())
    content = text[:begin].rstrip()
    calls: list[dict[str, str]] = []
    while begin >= 0:
        end = text.find(END, begin)
        if end < 0 and not has_ended:
            return CalledTools(content, tuple(calls))
        call = _read_call(text[begin + len(BEGIN) : None if end < 0 else end])
        if call is None:
            rest = text[begin:]
            return CalledTools(text if not calls else content + rest, tuple(calls))
        calls.append(call)
        begin = -1 if end < 0 else text.find(BEGIN, end)
    return CalledTools(content, tuple(calls))


def settled_length(text: str) -> int:
    """How much of a text without a call stays content, whatever follows: no blanks at its end."""
    for length in range(len(BEGIN) - 1, 0, -1):
        if text.endswith(BEGIN[:length]):
            text = text[:-length]
            break
    return len(text.rstrip())


def with_ids(calls: tuple[dict[str, str], ...], known: list[dict[str, Any]]) -> None:
    """Appends calls that `known`, those so far, doesn't have yet, as OpenAI's API has them."""
    for call in calls[len(known) :]:
        known.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": dict(call)}
        )


def _read_call(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments)}
