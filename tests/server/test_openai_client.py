"""The official client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice

from support.calling_model import ANSWER, CALLS, SUM, TEXT, write_calling_model
from support.serving import server_process

KEY = "a key of this test"[2:].replace(" ", "-")
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
OTHER: Any = {"type": "function", "function": {"name": "other"}}
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "1 + 2, and 3 + 4?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Yields a client of a server process, which all tests of this file share."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    model = write_calling_model(folder)
    options = ("--api-key-file", str(keys), "--kv-memory", "1MiB")
    with server_process(folder, *options, model=model) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        assert KEY not in server.log.read_text()


def test_it_lists_its_model(client: openai.OpenAI) -> None:
    """The list, and the model by its name."""
    assert ["calling"] == [model.id for model in client.models.list()]
    assert "calling" == client.models.retrieve("calling").id


def test_a_chat_completion(client: openai.OpenAI) -> None:
    """A whole answer, with its usage."""
    answer = client.chat.completions.create(
        model="calling",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
        temperature=0,
    )
    (choice,) = answer.choices
    assert ("length", "assistant") == (choice.finish_reason, choice.message.role)
    assert choice.message.content
    assert answer.usage is not None
    assert 5 == answer.usage.completion_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    """The parts of a stream are the answer that comes at once."""
    ask = client.chat.completions
    whole = ask.create(
        model="calling",
        messages=[{"role": "user", "content": "Tell"}],
        max_tokens=20,
        temperature=0,
    )
    stream = ask.create(
        model="calling",
        messages=[{"role": "user", "content": "Tell"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens


def test_a_wrong_key_is_refused(client: openai.OpenAI) -> None:
    """The client raises the error that it has for that."""
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_an_invalid_field_is_named(client: openai.OpenAI) -> None:
    """The client's error has it."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="calling", prompt="Hi", top_p=2)
    assert "top_p" == caught.value.param


def test_several_answers_with_stop_seed_and_log_probabilities(client: openai.OpenAI) -> None:
    """The client reads all of it; equal calls have equal answers."""
    first, second = (
        client.chat.completions.create(
            model="calling",
            messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}],
            max_completion_tokens=6,
            n=2,
            seed=7,
            stop=["e", "\n"],
            logprobs=True,
            top_logprobs=3,
        )
        for _ in range(2)
    )
    assert [0, 1] == [choice.index for choice in first.choices]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    for choice in first.choices:
        assert choice.logprobs is not None
        for token in choice.logprobs.content or ():
            assert 3 == len(token.top_logprobs)
            assert token.logprob <= 0


def test_a_completion_with_log_probabilities(client: openai.OpenAI) -> None:
    """The older API has another form of them."""
    answer = client.completions.create(
        model="calling", prompt="Hi", max_tokens=4, logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    """The error has the name of the model that is there."""
    with pytest.raises(openai.NotFoundError, match="calling") as caught:
        client.completions.create(model="gpt", prompt="Hi")
    assert "model_not_found" == caught.value.code


def test_a_model_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    """The conversation goes back as the client has it, with what the tools gave."""
    called = client.chat.completions.create(model="calling", messages=QUESTION, tools=[ADD])
    (choice,) = called.choices
    assert ("tool_calls", TEXT) == (choice.finish_reason, choice.message.content)
    calls = choice.message.tool_calls
    assert calls is not None
    assert len(CALLS) == len({call.id for call in calls})
    messages: list[Any] = [*QUESTION, choice.message]
    for call, expected in zip(calls, CALLS, strict=True):
        assert call.type == "function"
        assert ("add", expected) == (call.function.name, json.loads(call.function.arguments))
        result = SUM if expected == CALLS[-1] else "sum=3"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model="calling", messages=messages, tools=[ADD])
    assert ("stop", ANSWER) == (answer.choices[0].finish_reason, answer.choices[0].message.content)


def test_a_stream_has_the_calls_of_tools(client: openai.OpenAI) -> None:
    """The client puts them together, and sends them back."""
    with client.chat.completions.stream(
        model="calling", messages=QUESTION, tools=[ADD], stream_options={"include_usage": True}
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (choice,) = stream.get_final_completion().choices
    assert [(call, "add") for call in CALLS] == [(json.loads(e.arguments), e.name) for e in done]
    assert ("tool_calls", TEXT) == (choice.finish_reason, choice.message.content)
    result: Any = {"role": "tool", "tool_call_id": "x", "content": SUM}
    parts = client.chat.completions.create(
        model="calling", messages=[*QUESTION, result], tools=[ADD], stream=True
    )
    assert ANSWER == "".join(part.choices[0].delta.content or "" for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"parallel_tool_calls": False}, [CALLS[0]]),
        ({"tool_choice": "required", "parallel_tool_calls": True}, [{"a": 5, "b": 6}]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}}, "n": 2},
            [{"a": 5, "b": 6}],
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 1}, None),
        ({"tool_choice": "none", "max_tokens": 3, "temperature": 0}, []),
    ],
)
def test_a_client_says_how_tools_are_called(
    client: openai.OpenAI, said: Any, expected: list[Any] | None, stream: bool
) -> None:
    """A function that it names is called and nothing else is, also if the answer is cut."""
    tools = [ADD] if said.get("tool_choice") == "required" else [OTHER, ADD]
    settings = {"model": "calling", "messages": QUESTION, "tools": tools, **said}
    if stream:
        with client.chat.completions.stream(**settings) as parts:
            try:
                choices: Sequence[Choice] = parts.get_final_completion().choices
            except openai.LengthFinishReasonError as error:
                choices = error.completion.choices
    else:
        choices = client.chat.completions.create(**settings).choices
    assert said.get("n", 1) == len(choices)
    for choice in choices:
        functions = [
            call.function for call in choice.message.tool_calls or () if call.type == "function"
        ]
        if expected is None:
            assert [("add", '{"a": 5,')] == [(f.name, f.arguments) for f in functions]
            assert choice.finish_reason == "length"
            continue
        assert expected == [json.loads(function.arguments) for function in functions]
        assert all(function.name == "add" for function in functions)
        assert choice.finish_reason == ("tool_calls" if expected else "length")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("tool_choice", {"tool_choice": "required", "tools": [ADD, OTHER]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "any", "tools": [ADD]}),
        ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]}),
        (
            "tool_choice.function.name",
            {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [OTHER]},
        ),
        ("parallel_tool_calls", {"parallel_tool_calls": "no", "tools": [ADD]}),
        ("tools", {"tools": [ADD] * 129}),
        ("tools", {"tools": "add", "tool_choice": "none"}),
        ("tools[0].function.name", {"tools": [{"function": {}}], "tool_choice": "none"}),
        ("tools", {"tools": [{**ADD, "function": {"name": "x" * 300_000}}]}),
        (
            "tools",
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": 1}}}
                ]
            },
        ),
    ],
)
def test_a_choice_that_cant_be_held_is_refused(
    client: openai.OpenAI, field: str, said: Any
) -> None:
    """The error names the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="calling", messages=QUESTION, **said)
    assert field == caught.value.param
