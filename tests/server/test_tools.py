from __future__ import annotations

import json

import pytest

from kvtide.prompts import FieldError
from kvtide.server.tools import END, CalledTools, CallRules, read_calls, read_ruled, read_rules

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"name": "add", "arguments": json.dumps({"a": 1})}


def _read(text: str) -> CalledTools:
    return read_calls(text, has_ended=True)


def test_calls_are_taken_out_of_the_text() -> None:
    """The text before them stays, without the blanks at its end."""
    assert CalledTools("Let me see.", (ADD, ADD)) == _read(f"Let me see.\n{CALL}\n{CALL}")
    assert CalledTools("", (ADD,)) == _read(CALL)


def test_a_call_without_its_end_counts_if_it_is_whole() -> None:
    """A model may end its answer instead."""
    assert CalledTools("", (ADD,)) == _read(CALL.removesuffix("</tool_call>"))


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"a {CALL} then {CALL} end\n", "a then end", 2),
        (f"{CALL}\nDone.", "\nDone.", 1),
        (f"a {CALL} then <tool_call>bad</tool_call> end ", None, 1),
        (f"{CALL} <tool_c", " <tool_c", 1),
    ],
)
def test_text_between_and_behind_calls_stays(text: str, content: str | None, count: int) -> None:
    """All but the blanks before a call and at the end. What is no call keeps all that follows."""
    if content is None:
        content = "a" + text.partition(CALL)[2]
    assert CalledTools(content, (ADD,) * count) == _read(text)


def test_an_argument_may_have_what_ends_a_call() -> None:
    """A string ends where JSON says so. Not all of a hostile answer is read again and again."""
    calls = [
        f'<tool_call>{{"name": "add", "arguments": {{"a": "{END * count}"}}}}</tool_call>'
        for count in (1, 3, 1000)
    ]
    for text in calls[:2]:
        (call,) = _read(f"a {text} b").calls
        assert json.loads(call["arguments"]) == json.loads(text[11:-12])["arguments"]
        for length in range(2, len(text)):
            found = read_calls(f"a {text}"[:length], has_ended=False)
            assert ("a", ()) == (found.content, found.calls)
    assert CalledTools(calls[2], ()) == _read(calls[2])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_are_json(number: str) -> None:
    """Python reads and writes numbers that JSON doesn't have; a client can't read them."""
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": [{number}]}}}}</tool_call>'
    assert CalledTools(text, ()) == _read(text)


@pytest.mark.parametrize(
    "inner",
    ["{", "[]", '{"name": 5}', '{"arguments": {}}', '{"name": "a", "arguments": "b"}', "[" * 9999],
)
def test_what_is_no_call_stays_text(inner: str) -> None:
    """Nothing of an answer is lost."""
    text = f"a <tool_call>{inner}</tool_call> b"
    assert CalledTools(text, ()) == _read(text)
    assert CalledTools(f"a{text}", (ADD,)) == _read(f"a {CALL}{text}")


def test_what_is_no_call_is_told_as_soon_as_it_ends() -> None:
    """Nothing that follows makes it one."""
    text = "a <tool_call>x</tool_call> b"
    assert CalledTools(text, ()) == read_calls(text, has_ended=False)


def test_a_growing_text_never_takes_anything_back() -> None:
    """Each prefix has a beginning of the content, and of the calls."""
    for text in (
        f"a <b <tool_c {CALL} {CALL}",
        "a <tool_call>x</tool_call> b",
        "a <tool_call ",
        f"a {CALL} then\n{CALL}\n\nb <tool_call>x</tool_call> c ",
        f"a {CALL} b \n",
        'a <tool_call>{"name": "b </tool_call> c</tool_call> d',
    ):
        whole = _read(text)
        for length in range(len(text)):
            part = read_calls(text[:length], has_ended=False)
            assert whole.content.startswith(part.content)
            assert whole.calls[: len(part.calls)] == part.calls


RULES = CallRules(called="add", is_single=True)


@pytest.mark.parametrize(
    "written", [' {"a": 1', ' {"a": tru}}', " 5}", "", ' {"a": NaN}}', ' {"a": 1e999}}', "[" * 9999]
)
def test_a_call_that_must_be_there_has_what_the_model_wrote(written: str) -> None:
    """Nobody promises that it's JSON. Nothing is told before the answer has ended."""
    text = RULES.begin + written
    assert CalledTools("", ()) == read_ruled(text, RULES, has_ended=False)
    (call,) = read_ruled(text, RULES, has_ended=True).calls
    assert {"name": "add", "arguments": written.strip()} == call


@pytest.mark.parametrize(
    "behind",
    ["}", "", "}\n", ', "name": "other"}', f"}}\n{CALL}", f"}}</tool_call>{CALL}", "}} end"],
)
def test_a_call_that_must_be_there_is_the_first_object_that_the_model_writes(behind: str) -> None:
    """Nothing behind its arguments changes the function, or is another call."""
    text = f'{RULES.begin} {{"a":1}}{behind}'
    assert CalledTools("", (ADD,)) == read_ruled(text, RULES, has_ended=True)
    assert CalledTools("", ()) == read_ruled(text, RULES, has_ended=False)


@pytest.mark.parametrize(
    ("field", "said"),
    [("tool_choice", {"tool_choice": "required"}), ("parallel_tool_calls", {})],
)
def test_calls_of_another_form_cant_be_ruled(field: str, said: dict[str, object]) -> None:
    """They stay text, so nobody can say how many there are."""
    body = {"parallel_tool_calls": False, **said}
    with pytest.raises(FieldError, match="chat template") as caught:
        read_rules(body, ["add"], "here", are_read=False)
    assert field == caught.value.field
    assert CallRules() == read_rules({"tool_choice": "auto"}, ["add"], "here", are_read=False)
    assert CallRules() == read_rules({"parallel_tool_calls": False}, [], "here", are_read=False)
