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
        assert KEY not in server.log.read_text()


def test_it_lists_its_model(client: openai.OpenAI) -> None:
    """The list, and the model by its name."""
    assert ["tiny-random"] == [model.id for model in client.models.list()]
    assert "tiny-random" == client.models.retrieve("tiny-random").id


def test_a_chat_completion(client: openai.OpenAI) -> None:
    """A whole answer, with its usage."""
    answer = client.chat.completions.create(
        model="tiny-random",
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


def test_several_answers_with_stop_seed_and_log_probabilities(client: openai.OpenAI) -> None:
    """The client reads all of it; equal calls have equal answers."""
    first, second = (
        client.chat.completions.create(
            model="tiny-random",
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
        model="tiny-random", prompt="Hi", max_tokens=4, logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    """The error has the name of the model that is there."""
    with pytest.raises(openai.NotFoundError, match="tiny-random") as caught:
        client.completions.create(model="gpt", prompt="Hi")
    assert "model_not_found" == caught.value.code
