"""The official client against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from support.serving import server_process

KEY = "a key of this test"[2:].replace(" ", "-")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Yields a client of a server process, which all tests of this file share."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    with server_process(folder, "--api-key-file", str(keys), "--kv-memory", "1MiB") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_it_lists_its_model(client: openai.OpenAI) -> None:
    """The list, and the model by its name."""
    assert ["tiny-random"] == [model.id for model in client.models.list()]
    assert "tiny-random" == client.models.retrieve("tiny-random").id


def test_a_chat_completion(client: openai.OpenAI) -> None:
    """A whole answer, with its usage."""
    answer = client.chat.completions.create(
        model="tiny-random", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, seed=3
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
        model="tiny-random",
        messages=[{"role": "user", "content": "Tell"}],
        max_tokens=20,
        temperature=0,
    )
    stream = ask.create(
        model="tiny-random",
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
        client.completions.create(model="tiny-random", prompt="Hi", top_p=2)
    assert "top_p" == caught.value.param
