"""Calls of tools in an answer's text, where the model's chat template has a form that is known.

Known is the form that Qwen's and Hermes' templates teach: `<tool_call>`, a JSON object with `name`
and `arguments`, `</tool_call>`, once for each call, after the text if there is any.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from kvtide.errors import shortened
from kvtide.prompts.fields import check_bool, check_object, check_text, quote, refuse

BEGIN, END = "<tool_call>", "</tool_call>"
_MOST_ENDS = 16
"""How often an END is looked at that a string of a call's arguments may have."""


def are_known(chat_template: str) -> bool:
    """Whether a chat template has the known form."""
    return BEGIN in chat_template


@final
@dataclass(frozen=True)
class CallRules:
    """What a client says of the calls in an answer, beside the tools that there are."""

    called: str | None = None
    """The function that is called in any case: the answer begins with its call, and has no other.
    """
    is_single: bool = False
    """Whether the answer ends with its first call."""

    @property
    def begin(self) -> str:
        """What the answer begins with, up to where the arguments do, and the model goes on."""
        return "" if self.called is None else BEGIN + self.head

    @property
    def head(self) -> str:
        """The text after BEGIN."""
        return f'\n{{"name": {json.dumps(self.called)}, "arguments":'


def read_rules(
    body: Mapping[str, Any], names: Sequence[str], where: str, *, are_read: bool
) -> CallRules:
    """The rules of `tool_choice` and `parallel_tool_calls`, with tools of these names.

    `are_read` says whether the model's calls have the known form. Raises FieldError for what can't
    be held.
    """
    called = _called(body.get("tool_choice"), names, where)
    said = body.get("parallel_tool_calls")
    is_single = said is not None and not check_bool(said, "parallel_tool_calls", where)
    field = "tool_choice" if called is not None else "parallel_tool_calls"
    if names and not are_read and (called is not None or is_single):
        refuse(
            where,
            f"'{field}' can't be held, since the model's chat template has no calls of the form "
            f"{BEGIN}; leave it out",
            field,
        )
    return CallRules(called, is_single=bool(names) and (is_single or called is not None))


def _called(choice: object, names: Sequence[str], where: str) -> str | None:
    """The function that must be called; None if the model may choose."""
    field = "tool_choice"
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if len(names) == 1:
            return names[0]
        if not names:
            refuse(where, f"'{field}' is \"required\", and there are no 'tools'; send some", field)
        refuse(
            where,
            f"'{field}' is \"required\" with {len(names)} tools, and kvtide can only have a single "
            "function called: name it in 'tool_choice', or send its tool alone",
            field,
        )
    if isinstance(choice, str):
        known = "auto, none, required, or an object that names a function"
        refuse(where, f"'{field}' is {quote(choice)}; known are {known}", field)
    function = check_object(choice, field, where)
    if function.get("type") != "function":
        refuse(where, f"'{field}.type' isn't \"function\", the only one known", f"{field}.type")
    function = check_object(function.get("function"), f"{field}.function", where)
    name = check_text(function.get("name"), f"{field}.function.name", where)
    if name not in names:
        there = shortened(", ".join(names), 100) if names else "none"
        said = f"'{field}.function.name' is {quote(name)}, and the tools are: {there}"
        refuse(where, said, f"{field}.function.name")
    return name


@final
@dataclass(frozen=True)
class CalledTools:
    """What a text says: its content, and the calls of tools that are complete in it."""

    content: str
    calls: tuple[dict[str, str], ...]
    """`name`, and `arguments` as JSON, of each call."""


def read_calls(text: str, *, has_ended: bool) -> CalledTools:
    """Reads the text of an answer as far as it is.

    The text before, between and behind the calls is content, without the blanks at the end of each
    part. What may still become a call isn't in the content yet. A call that can't be read, and all
    that follows it, is content: nothing of an answer is lost but these blanks.
    """
    content, calls, start = "", list[dict[str, str]](), 0
    while (begin := text.find(BEGIN, start)) >= 0:
        before = text[start:begin].rstrip()
        first = begin + len(BEGIN)
        end = _end_of_call(text, first)
        if end < 0 and not has_ended:
            return CalledTools(content + before, tuple(calls))
        call = _read_call(text[first : None if end < 0 else end])
        if call is None:
            return CalledTools(content + text[start:], tuple(calls))
        content += before
        calls.append(call)
        start = len(text) if end < 0 else end + len(END)
    rest = text[start:]
    if not has_ended:
        rest = rest[: settled_length(rest)]
    return CalledTools(content + (rest.rstrip() if calls else rest), tuple(calls))


def read_ruled(text: str, rules: CallRules, *, has_ended: bool) -> CalledTools:
    """Reads the text of an answer, with what it began with, as far as it is, by the rules.

    A call that must be there is there in the end, and nothing else: its arguments are the object
    that the model began with. Where that can't be read, since it was cut or isn't JSON, they are
    what the model wrote.
    """
    if rules.called is None:
        return read_calls(text, has_ended=has_ended)
    if not has_ended:
        return CalledTools("", ())
    written = text.removeprefix(rules.begin).strip()
    try:
        arguments = _json_of(json.JSONDecoder().raw_decode(written)[0])
    except (ValueError, RecursionError):
        arguments = None
    return CalledTools("", ({"name": rules.called, "arguments": arguments or written},))


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


def _end_of_call(text: str, first: int) -> int:
    """Where the call that begins at `first` ends; -1 while it doesn't. A string may have an END."""
    end = first
    for _ in range(_MOST_ENDS):
        end = text.find(END, end)
        if end < 0 or not _ends_in_string(text[first:end]):
            break
        end += len(END)
    return end


def _ends_in_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _read_call(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = _json_of(call.get("arguments", {}))
    except (ValueError, RecursionError):
        return None
    return None if arguments is None else {"name": call["name"], "arguments": arguments}


def _json_of(arguments: object) -> str | None:
    """The arguments of a call as JSON; None if they are no object.

    Raises ValueError for NaN and infinite numbers, which Python reads, and JSON doesn't have.
    """
    return json.dumps(arguments, allow_nan=False) if isinstance(arguments, dict) else None
