from __future__ import annotations

import json
from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.prompts import Prompt, parse_prompt

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def _parse(*messages: object, **fields: object) -> Prompt:
    line = {"id": "a", "messages": messages, **fields}
    return parse_prompt(json.dumps(line).encode(), where="f, line 1")


def test_parts_of_text_are_one_text() -> None:
    """The parts are joined as they are, with nothing between them."""
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]
    assert ({"role": "user", "content": "Say hi"},) == _parse(
        {"role": "user", "content": parts}
    ).messages


def test_a_conversation_with_a_tool_is_kept_for_the_template() -> None:
    """The arguments become an object, as templates read them; a call needs no content."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": ""}
    prompt = _parse({"role": "developer", "content": "Be brief."}, called, told, tools=[TOOL])
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    expected = {"id": "c1", "type": "function", "function": function}
    assert (
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [expected]},
        told,
    ) == prompt.messages
    assert (TOOL,) == prompt.tools


def test_an_answer_of_the_api_can_be_sent_back() -> None:
    """An answer of text has keys that are null or empty; they are accepted."""
    unset: dict[str, object] = {
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
    }
    prompt = _parse({"role": "assistant", "content": "Hi", "tool_calls": None, **unset})
    assert ({"role": "assistant", "content": "Hi"},) == prompt.messages


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def _calling(**function: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


DEEP = '{"a":' * 500 + "1" + "}" * 500


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("x", "messages[0] is a string, not an object"),
        ({"content": "x"}, "messages[0] lacks a 'role'"),
        ({"role": "user"}, "messages[0] lacks a 'content'"),
        ({"role": "assistant"}, "messages[0] lacks a 'content'"),
        ({"role": "function", "content": "x"}, 'messages[0].role is "function"; known are system,'),
        (_user(None), "'messages[0].content' is null, not a string"),
        (_user(""), "'messages[0].content' is empty"),
        (_user([]), "'messages[0].content' is empty"),
        (_user([1]), "'messages[0].content[0]' is a number (1), not an object"),
        (_user([{"text": "x"}]), "'messages[0].content[0].type' is null"),
        (
            _user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]),
            'messages[0].content[1].type is "image_url"; only text is taken',
        ),
        (_user([{"type": "text"}]), "'messages[0].content[0].text' is null, not a string"),
        (_user([{"type": "text", "text": "x", "y": 1}]), 'has an unknown key "y"'),
        ({**_user("x"), "tool_calls": [CALL]}, 'unknown key "tool_calls"; known are role, content'),
        ({**_user("x"), "nam": "y"}, 'messages[0] has an unknown key "nam"'),
        ({**_user("x"), "name": 3}, "'messages[0].name' is a number (3)"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, 'has an unknown key "refusal"'),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "'messages[0].tool_call_id' is a"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0] lacks a 'content'"),
        ({"role": "assistant", "tool_calls": [1]}, "'messages[0].tool_calls[0]' is a number"),
        (_calling(), "'messages[0].tool_calls[0].function.name' is null"),
        (_calling(name="f"), "'messages[0].tool_calls[0].function.arguments' is null"),
        (_calling(name="f", arguments="{"), "function.arguments' is not JSON"),
        (_calling(name="f", arguments="[" * 100_000), "function.arguments' is not JSON"),
        (_calling(name="f", arguments='{"a": NaN}'), "function.arguments' is not JSON"),
        (_calling(name="f", arguments='{"a": -1e999}'), "function.arguments' is not JSON"),
        (_calling(name="f", arguments="[]"), "function.arguments' is a list, not an object"),
        (_calling(name="f", arguments={"\ud800": 1}), "arguments' has half a surrogate pair"),
        (
            _calling(name="f", arguments={}, x=1),
            'has an unknown key "x"; known are name, arguments',
        ),
    ],
)
def test_bad_message_is_refused_by_its_place(message: object, complaint: str) -> None:
    """The field is named from the line's beginning on."""
    with pytest.raises(UsageError) as error:
        _parse(message)
    assert str(error.value).startswith("f, line 1: ")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ({"a": 1}, "'tools' is an object, not a list"),
        ({}, "'tools' is an object, not a list"),
        (0, "'tools' is a number (0), not a list"),
        ([1], "'tools[0]' is a number (1), not an object"),
        ([{"type": "web_search"}], 'tools[0].type is "web_search"; only function is known'),
        ([{"type": 1}], "tools[0].type is a number (1); only function is known"),
        ([{"type": "function"}], "'tools[0].function' is null, not an object"),
        ([{"type": "function", "function": {}}], "'tools[0].function.name' is null"),
        ([{**TOOL, "x": 1}], 'tools[0] has an unknown key "x"'),
        (
            [{"function": {"name": "f", "strict": True}}],
            "'tools[0].function.strict' is set, and kvtide doesn't constrain answers",
        ),
        ([{"function": {"name": "f", "description": "\ud800"}}], "has half a surrogate pair"),
    ],
)
def test_bad_tool_is_refused_by_its_place(tools: object, complaint: str) -> None:
    """Only the form of a tool's description is checked; its meaning is for the model."""
    with pytest.raises(UsageError) as error:
        _parse(_user("x"), tools=tools)
    assert complaint in str(error.value)


def test_messages_are_a_list_that_is_not_empty() -> None:
    """A string and an empty list are refused."""
    wrong: dict[str, Any] = {"'messages' is a string, not a list": "x", "'messages' is empty": []}
    for complaint, messages in wrong.items():
        line = json.dumps({"id": "a", "messages": messages}).encode()
        with pytest.raises(UsageError, match=complaint):
            parse_prompt(line, where="f, line 1")


def test_deep_values_are_kept_or_refused() -> None:
    """A value of any depth never ends in a traceback."""
    message = _calling(name="f", arguments=json.loads(DEEP))
    assert json.loads(DEEP) == _parse(message).messages[0]["tool_calls"][0]["function"]["arguments"]
