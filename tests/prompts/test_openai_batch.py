from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import UsageError
from kvtide.prompts import BODY_KEYS, FieldError, Prompt, parse_batch_line, read_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def _parse(body: object, url: str = CHAT, **fields: object) -> Prompt:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body, **fields}
    return parse_batch_line(json.dumps(line).encode(), where="f, line 1")


def _chat(**fields: object) -> Prompt:
    return _parse({"model": "gpt", "messages": [USER], **fields})


def _text(**fields: object) -> Prompt:
    return _parse({"model": "gpt", "prompt": "Once", **fields}, TEXT)


def test_a_chat_completion_is_a_conversation_with_settings() -> None:
    """The settings have the names of the API."""
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = _chat(
        max_completion_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop="END", n=2, tools=[tool]
    )
    assert prompt == Prompt(
        "f, line 1",
        "a",
        (USER,),
        is_chat=True,
        is_openai=True,
        field="body.messages",
        tools=(tool,),
        settings={
            "max_new_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stop": ("END",),
        },
        sample_count=2,
    )


def test_a_completion_is_raw_text() -> None:
    """It is continued, not put into a chat template."""
    prompt = _text(max_tokens=5, logprobs=3)
    assert prompt.is_raw
    assert ({"role": "user", "content": "Once"},) == prompt.messages
    assert {"max_new_tokens": 5, "logprobs": 3} == prompt.settings
    assert prompt.messages == _text(prompt=["Once"]).messages
    assert not _chat().is_raw


def test_a_completion_may_have_tokens_and_several_prompts() -> None:
    """All have the same settings, and each has its own seeds, since it has its own place."""
    assert (5, 6) == _text(prompt=[5, 6]).token_ids
    assert _text(n=3) == _text(n=3, best_of=3)
    body = {"prompt": ["a", "b"], "n": 2, "temperature": 1}
    first, second = read_body(body, "x", "here", is_chat=False)
    assert ["a", "b"] == [prompt.messages[0]["content"] for prompt in (first, second)]
    assert ["prompt[0]", "prompt[1]"] == [first.field, second.field]
    assert {"temperature": 1.0} == first.settings == second.settings
    assert (0, 1, 2) == (first.place, second.place, second.sample_count)
    first, second = read_body({"prompt": [[1, 2], [3]]}, "x", "here", is_chat=False)
    assert ((1, 2), (3,)) == (first.token_ids, second.token_ids)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {"logprobs": None}),
    ],
)
def test_logprobs_of_a_chat_are_said_in_two_fields(
    said: dict[str, object], expected: dict[str, object]
) -> None:
    """False wins over the option; a field that is missing doesn't."""
    assert expected == _chat(**said).settings


def test_fields_without_effect_are_accepted() -> None:
    """They are bookkeeping, or their values ask for what kvtide does anyway."""
    plain = _chat()
    bookkeeping = {"user": "u", "metadata": {"k": "v"}, "store": True, "service_tier": "auto"}
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stream": False}
    assert plain == _chat(**bookkeeping, **neutral, response_format={"type": "text"})
    assert plain == _chat(tools=None, response_format=None, reasoning_effort=None, tool_choice=None)
    assert _text() == _text(echo=False, best_of=1, suffix="")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"messages": []}, "'body.messages' is empty"),
        ({"messages": [{"role": "user", "content": 1}]}, "'body.messages[0].content' is a number"),
        ({"max_token": 3}, 'body has an unknown key "max_token"; obeyed are messages, tools, n,'),
        ({"prompt": "x"}, 'body has an unknown key "prompt"'),
        ({"max_tokens": 0}, "'body.max_tokens' is 0; it must be from 1"),
        (
            {"max_tokens": 3, "max_completion_tokens": 3},
            "has both 'body.max_tokens' and 'body.max_completion_tokens'; keep one",
        ),
        ({"temperature": -1}, "'body.temperature' is -1.0; it must be 0 (greedy)"),
        ({"n": 0}, "'body.n' is 0"),
        ({"logprobs": 3}, "'body.logprobs' is a number (3), not true or false"),
        ({"top_logprobs": 3}, "has 'body.top_logprobs', which needs 'body.logprobs' to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "'body.top_logprobs' is 21; it must be from 0"),
        ({"frequency_penalty": 0.5}, "'body.frequency_penalty' is 0.5; kvtide can only do 0"),
        ({"logit_bias": {"5": 1}}, "'body.logit_bias' is {\"5\": 1}; kvtide can only do {}"),
        (
            {"response_format": {"type": "json_object"}},
            '\'body.response_format\' is {"type": "json_object"}; kvtide can only do {"type"',
        ),
        ({"frequency_penalty": False}, "'body.frequency_penalty' is false; kvtide can only do 0"),
        ({"parallel_tool_calls": 1}, "'body.parallel_tool_calls' is 1; kvtide can only do true"),
        ({"stream": 0}, "'body.stream' is 0; kvtide can only do false"),
        ({"stream": True}, "'body.stream' is true; kvtide can only do false"),
        ({"tool_choice": "required"}, "'body.tool_choice' is \"required\"; kvtide can only do"),
        ({"reasoning_effort": "low"}, "'body.reasoning_effort' asks for something that kvtide"),
        ({"tools": [{"type": "file_search"}]}, 'body.tools[0].type is "file_search"'),
    ],
)
def test_an_impossible_request_is_refused_by_name(body: dict[str, Any], complaint: str) -> None:
    """It isn't answered as if the field weren't there."""
    with pytest.raises(UsageError) as error:
        _chat(**body)
    assert str(error.value).startswith("f, line 1: ")
    assert complaint in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"prompt": None}, "'body.prompt' is null, not a string"),
        ({"prompt": ["a", "b"]}, "'body.prompt' has 2 prompts; write a line for each"),
        ({"prompt": ["a", 1]}, "'body.prompt[1]' is a number (1), not a string"),
        ({"prompt": ["a"] * 2049}, "'body.prompt' has 2049 prompts; it must have at most 2048"),
        ({"prompt": [1, -2]}, "'body.prompt[1]' is -2; it must be from 0"),
        ({"prompt": [1, True]}, "'body.prompt[1]' is true or false, not a whole number"),
        ({"prompt": [1.5]}, "'body.prompt[0]' is a number (1.5), not a whole number"),
        ({"prompt": [[1], []]}, "'body.prompt[1]' is empty"),
        ({"prompt": [[1], ["a"]]}, "'body.prompt[1][0]' is a string, not a whole number"),
        ({"prompt": []}, "'body.prompt' is empty"),
        ({"best_of": 3, "n": 2}, "'body.best_of' is 3; kvtide can only do 2"),
        ({"best_of": True}, "'body.best_of' is true; kvtide can only do 1"),
        ({"best_of": 1.0, "n": 1}, "'body.best_of' is 1.0; kvtide can only do 1"),
        ({"echo": True}, "'body.echo' is true; kvtide can only do false"),
        ({"messages": [USER]}, 'body has an unknown key "messages"'),
    ],
)
def test_a_bad_completion_is_refused_by_name(body: dict[str, Any], complaint: str) -> None:
    """A completion has other fields than a chat."""
    with pytest.raises(UsageError) as error:
        _text(**body)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"id": "x"}, 'unknown key "id"; known are custom_id, method, url, body'),
        ({"custom_id": 3}, "'custom_id' is a number (3), not a string"),
        ({"method": "GET"}, "'method' isn't \"POST\""),
        ({"url": "/v1/embeddings"}, "'url' is \"/v1/embeddings\"; known are /v1/chat/completions,"),
        ({"body": []}, "'body' is a list, not an object"),
        ({"body": {}}, "body lacks 'messages'"),
    ],
)
def test_a_bad_line_around_the_body_is_refused(fields: dict[str, Any], complaint: str) -> None:
    """The request's place in the API must be known."""
    with pytest.raises(UsageError) as error:
        _parse(**{"body": {"messages": [USER]}, **fields})
    assert complaint in str(error.value)


def test_a_missing_key_is_named() -> None:
    """The error names each key of the format that the line lacks."""
    line = {"custom_id": "a", "url": CHAT, "body": {"messages": [USER]}}
    assert "a" == parse_batch_line(json.dumps(line).encode(), where="f, line 1").id
    for key in line:
        rest = {name: value for name, value in line.items() if name != key}
        with pytest.raises(UsageError, match=f"lacks a '{key}'"):
            parse_batch_line(json.dumps(rest).encode(), where="f, line 1")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(BODY_KEYS) | st.text(), json_values), st.booleans())
def test_any_body_gives_a_prompt_or_a_usage_error(body: dict[str, Any], is_chat: bool) -> None:
    """No line, however odd, ends in a traceback."""
    try:
        prompt = _parse(body, CHAT if is_chat else TEXT)
    except UsageError as error:
        assert str(error).startswith("f, line 1: ")  # noqa: PT017 - either outcome is right
    else:
        assert prompt.messages or prompt.token_ids


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", {"temperature": -1}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop[1]", {"stop": ["a", ""]}),
        ("messages[0].role", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].colour", {"messages": [{"role": "user", "content": "x", "colour": 1}]}),
        ("messages", {"messages": []}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("max_completion_tokens", {"max_tokens": 5, "max_completion_tokens": 5}),
        ("tools[0].function.strict", {"tools": [{"function": {"name": "a", "strict": True}}]}),
        ("colour", {"colour": 1}),
    ],
)
def test_an_error_of_a_body_names_its_field(field: str, values: dict[str, object]) -> None:
    """A server tells its client which field it means, beside what is wrong with it."""
    body = {"messages": [{"role": "user", "content": "x"}], **values}
    with pytest.raises(FieldError) as caught:
        read_body(body, "a", "here", is_chat=True)
    assert field == caught.value.field
    assert field.rpartition(".")[2] in caught.value.what
