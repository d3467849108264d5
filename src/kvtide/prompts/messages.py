"""Checks the messages of a conversation and the tools in it, as OpenAI's API describes them.

They become what chat templates read: the text parts of a content are joined, and the arguments of
a tool call are an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtide.prompts.fields import (
    check_list,
    check_object,
    check_text,
    check_whole_characters,
    finite,
    kind_of,
    quote,
    refuse,
    refuse_constant,
    refuse_unknown_keys,
)
from kvtide.prompts.prompt import Message

_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
"""The keys of a message by its role."""
_UNSET = ("refusal", "audio", "function_call", "annotations")
"""Keys that an answer of OpenAI's API has; a conversation that goes on with one has them too."""


MOST_TOOLS = 128
"""The most tools of a prompt."""
_MOST_TOOL_CHARACTERS = 1 << 18
"""The most characters that its tools may have together, as JSON: the model reads them all."""


def check_messages(value: object, where: str, *, prefix: str = "") -> tuple[Message, ...]:
    """The messages of a conversation. `prefix` stands before `messages` in errors."""
    name = f"{prefix}messages"
    messages = check_list(value, name, where)
    return tuple(_message(message, f"{name}[{n}]", where) for n, message in enumerate(messages))


def _message(value: object, name: str, where: str) -> Message:
    if not isinstance(value, dict):
        refuse(where, f"{name} is {kind_of(value)}, not an object with 'role' and 'content'", name)
    if "role" not in value:
        refuse(where, f"{name} lacks a 'role'", name)
    role = check_text(value["role"], f"{name}.role", where)
    if role not in _KEYS:
        refuse(where, f"{name}.role is {quote(role)}; known are {', '.join(_KEYS)}", f"{name}.role")
    fields = {key: held for key, held in value.items() if key not in _UNSET or held}
    refuse_unknown_keys(fields, _KEYS[role], where, name=name)
    message: dict[str, Any] = {"role": role, "content": _content(fields, name, where)}
    for key in ("name", "tool_call_id"):
        if fields.get(key) is not None:
            message[key] = check_text(fields[key], f"{name}.{key}", where)
    if fields.get("tool_calls") is not None:
        calls = check_list(fields["tool_calls"], f"{name}.tool_calls", where)
        message["tool_calls"] = [
            _tool_call(call, f"{name}.tool_calls[{n}]", where) for n, call in enumerate(calls)
        ]
    return message


def _content(fields: Mapping[str, object], name: str, where: str) -> str:
    """The text of a message. One of the assistant's that calls a tool needs none."""
    value = fields.get("content")
    if value is None and fields.get("tool_calls"):
        return ""
    if "content" not in fields:
        refuse(where, f"{name} lacks a 'content'", name)
    # A tool may have nothing to say.
    may_be_empty = fields["role"] in ("assistant", "tool")
    if isinstance(value, list):
        parts = check_list(value, f"{name}.content", where)
        texts = [_part(part, f"{name}.content[{n}]", where) for n, part in enumerate(parts)]
        value = "".join(texts)
    return check_text(value, f"{name}.content", where, may_be_empty=may_be_empty)


def _part(value: object, name: str, where: str) -> str:
    part = check_object(value, name, where)
    kind = check_text(part.get("type"), f"{name}.type", where)
    if kind != "text":
        refuse(where, f"{name}.type is {quote(kind)}; only text is taken", f"{name}.type")
    refuse_unknown_keys(part, ("type", "text"), where, name=name)
    return check_text(part.get("text"), f"{name}.text", where, may_be_empty=True)


def _tool_call(value: object, name: str, where: str) -> dict[str, Any]:
    call = check_object(value, name, where)
    refuse_unknown_keys(call, ("id", "type", "function"), where, name=name)
    function = _function(call, name, where)
    refuse_unknown_keys(function, ("name", "arguments"), where, name=f"{name}.function")
    checked = {"type": "function", "function": dict(function)}
    if call.get("id") is not None:
        checked["id"] = check_text(call["id"], f"{name}.id", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=refuse_constant, parse_float=finite)
        except (ValueError, RecursionError):
            refuse(where, f"'{name}.function.arguments' is not JSON", f"{name}.function.arguments")
    arguments = check_object(arguments, f"{name}.function.arguments", where)
    check_whole_characters(arguments, f"{name}.function.arguments", where)
    return {**checked, "function": {"name": function["name"], "arguments": arguments}}


def check_tools(value: object, where: str, *, prefix: str = "") -> tuple[Message, ...]:
    """The tools that the model is told of, as they are in the line; null and [] are none."""
    if value is None or value == []:
        return ()
    name = f"{prefix}tools"
    tools = check_list(value, name, where)
    if len(tools) > MOST_TOOLS:
        refuse(where, f"'{name}' has {len(tools)} tools; it must have at most {MOST_TOOLS}", name)
    checked = tuple(_tool(tool, f"{name}[{n}]", where) for n, tool in enumerate(tools))
    length = len(json.dumps(tools))
    if length > _MOST_TOOL_CHARACTERS:
        refuse(
            where,
            f"'{name}' has {length} characters; it must have at most {_MOST_TOOL_CHARACTERS}",
            name,
        )
    return checked


def _tool(value: object, name: str, where: str) -> Message:
    tool = check_object(value, name, where)
    refuse_unknown_keys(tool, ("type", "function"), where, name=name)
    function = _function(tool, name, where)
    if function.get("strict"):
        field = f"{name}.function.strict"
        refuse(where, f"'{field}' is set, and kvtide doesn't constrain answers", field)
    check_whole_characters(function, f"{name}.function", where)
    return tool


def _function(fields: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    kind = fields.get("type", "function")
    if kind != "function":
        shown = quote(kind) if isinstance(kind, str) else kind_of(kind)
        refuse(where, f"{name}.type is {shown}; only function is known", f"{name}.type")
    function = check_object(fields.get("function"), f"{name}.function", where)
    check_text(function.get("name"), f"{name}.function.name", where)
    return function
