"""The routes within this process: what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi.routing import APIRoute

from serve.harness import check_rows_once
from support.serving import Served, serve_and

KEYS = ("first-key", "second-key")


def _events(response: httpx.Response) -> list[Any]:
    """Returns the objects of a stream, whose end is checked."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert "data: [DONE]" == lines.pop()
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert status == response.status_code, response.text
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    return error


@pytest.fixture(autouse=True)
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets the engines of these tests share a self-check."""
    check_rows_once(monkeypatch)
    return monkeypatch


def test_health_and_unknown_paths() -> None:
    """An unknown path is told in the form of OpenAI's errors."""

    async def test(server: Served) -> None:
        assert {"status": "ok"} == (await server.client.get("/health")).json()
        unknown = _error(await server.client.get("/nothing"), 404)
        for route in server.app.routes:
            assert isinstance(route, APIRoute)
            path = re.sub("{.*}", "NAME", route.path)
            assert route.methods is not None
            (method,) = route.methods
            assert f"{method} {path}" in unknown["message"]
        _error(await server.client.get("/v1/models/"), 404)
        _error(await server.client.post("/v1/completions/"), 404)
        _error(await server.client.get("/v1/completions"), 405)

    serve_and(test)


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": "warm"}),
    ("max_tokens", {"max_tokens": 0}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": 5}),
    ("prompt[1]", {"prompt": [5, 260]}),
    ("prompt[1][0]", {"prompt": [[5], [260]]}),
    ("prompt[2]", {"prompt": ["a", "b", ""]}),
    ("prompt", {"prompt": ["a"] * 33, "n": 2}),
    ("prompt", {"prompt": "a" * 600}),
    ("prompt[1]", {"prompt": ["a", "a" * 600], "n": 2}),
    ("prompt[2]", {"prompt": [[5], [6], [7] * 9000]}),
    ("echo", {"echo": True, "logprobs": 0}),
    ("best_of", {"best_of": 2}),
    ("suffix", {"suffix": "end"}),
    ("n", {"n": 0}),
    ("logprobs", {"logprobs": 21}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.all", {"stream": True, "stream_options": {"all": True}}),
    ("logit_bias", {"logit_bias": {"5": 3}}),
    ("colour", {"colour": "red"}),
    ("model", {"model": 5}),
    ("stop[1]", {"stop": ["a", "a" * 1001]}),
]


def test_an_invalid_field_is_named() -> None:
    """The status is 400, and the message has the field, too."""

    async def test(server: Served) -> None:
        for field, values in INVALID:
            error = _error(await server.complete(**{"prompt": "Hi", **values}), 400)
            assert (field, "invalid_request_error") == (error["param"], error["type"]), error
            assert field.rpartition(".")[2] in error["message"]
            assert 0 == server.service.live_count

    serve_and(test)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """A body of JSON must be an object of JSON."""

    async def test(server: Served) -> None:
        headers = {"content-type": "application/json"}
        answer = await server.client.post("/v1/completions", content=body, headers=headers)
        assert "invalid_request_error" == _error(answer, 400)["type"]

    serve_and(test)


def test_bodies_of_another_type_or_size_are_refused() -> None:
    """A form of another page's can't call the server, and a large body isn't read."""

    async def test(server: Served) -> None:
        post = server.client.post
        _error(await post("/v1/completions", content=b"{}"), 415)
        long = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}

        async def parts() -> Any:
            yield long[:1000]
            yield long[1000:]

        for content in (long, parts()):
            answer = await post("/v1/completions", content=content, headers=headers)
            assert "--max-body" in _error(answer, 413)["message"]

    serve_and(test, body_bytes=1500)


def test_several_answers_to_a_prompt() -> None:
    """Each has its own random numbers; the prompt counts once."""

    async def test(server: Served) -> None:
        body = {"prompt": "abc", "n": 3, "max_tokens": 8, "seed": 1, "temperature": 1}
        found = (await server.complete(**body)).json()
        texts = [choice["text"] for choice in found["choices"]]
        assert [0, 1, 2] == [choice["index"] for choice in found["choices"]]
        assert 3 == len(set(texts))
        assert 3 == found["usage"]["prompt_tokens"]
        again = (await server.complete(**body)).json()
        assert texts == [choice["text"] for choice in again["choices"]]
        streamed = ["", "", ""]
        for event in _events(await server.complete(**body, stream=True)):
            (choice,) = event["choices"]
            streamed[choice["index"]] += choice["text"]
        assert texts == streamed

    serve_and(test)


def test_tools_that_the_template_leaves_out_are_named() -> None:
    """The conversation is right, so the error doesn't mean the messages."""

    async def test(server: Served) -> None:
        tool = {"type": "function", "function": {"name": "add"}}
        error = _error(await server.chat(tools=[tool]), 400)
        assert "tools" == error["param"]
        assert "chat template" in error["message"]
        assert 200 == (await server.chat(tools=[tool], tool_choice="none")).status_code

    serve_and(test)


def test_several_prompts_are_answered_as_each_alone() -> None:
    """Answers to a prompt stand side by side; a text and its tokens are the same prompt."""

    async def test(server: Served) -> None:
        texts = ("abcdef", "xyz")
        prompts = [server.tokens(text) for text in texts]
        body = {"n": 2, "max_tokens": 8, "seed": 3, "temperature": 1}
        alone = [(await server.complete(prompt=prompt, **body)).json() for prompt in prompts]
        expected = [choice["text"] for answer in alone for choice in answer["choices"]]
        assert 4 == len(set(expected))
        for given in (texts, prompts):
            answer = (await server.complete(prompt=given, **body)).json()
            assert [0, 1, 2, 3] == [choice["index"] for choice in answer["choices"]]
            assert expected == [choice["text"] for choice in answer["choices"]]
            assert (9, 32) == (
                answer["usage"]["prompt_tokens"],
                answer["usage"]["completion_tokens"],
            )
            streamed = ["", "", "", ""]
            for event in _events(await server.complete(prompt=given, **body, stream=True)):
                (choice,) = event["choices"]
                streamed[choice["index"]] += choice["text"]
            assert expected == streamed

    serve_and(test)


def test_cached_tokens_are_those_of_all_prompts() -> None:
    """The prompts' tokens are counted alike: once, however many answers a prompt has."""

    async def test(server: Served) -> None:
        async def cached(*prompts: str, n: int = 1) -> int:
            usage = (await server.complete(prompt=prompts, max_tokens=1, n=n)).json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            assert found <= usage["prompt_tokens"]
            return found

        texts = ("ab" * 70, "cd" * 70)
        assert 0 == await cached(*texts)
        each = [await cached(text) for text in texts]
        assert all(each)
        assert sum(each) == await cached(*texts) == await cached(*texts, n=3)

    serve_and(test)


def test_an_echo_begins_with_the_prompt() -> None:
    """In a stream, too, and where the prompt came as tokens."""

    async def test(server: Served) -> None:
        body = {"prompt": ["abc", "xyz"], "max_tokens": 5, "temperature": 0}
        plain = [choice["text"] for choice in (await server.complete(**body)).json()["choices"]]
        expected = ["abc" + plain[0], "xyz" + plain[1]]
        body |= {"echo": True, "prompt": [server.tokens("abc"), server.tokens("xyz")]}
        answer = (await server.complete(**body)).json()
        assert expected == [choice["text"] for choice in answer["choices"]]
        streamed = ["", ""]
        for event in _events(await server.complete(**body, stream=True)):
            (choice,) = event["choices"]
            streamed[choice["index"]] += choice["text"]
        assert expected == streamed

    serve_and(test)


def test_stop_strings_are_never_sent() -> None:
    """A stream holds back what may become one."""

    async def test(server: Served) -> None:
        body = {"prompt": "abc", "max_tokens": 40, "temperature": 0}
        text = (await server.complete(**body)).json()["choices"][0]["text"]
        stop = text[10:14]
        (choice,) = (await server.complete(**body, stop=[stop])).json()["choices"]
        assert ("stop", text[: text.index(stop)]) == (choice["finish_reason"], choice["text"])
        events = _events(await server.complete(**body, stop=[stop], stream=True))
        assert choice["text"] == "".join(event["choices"][0]["text"] for event in events)

    serve_and(test)


def test_log_probabilities_of_a_stream_are_those_of_the_whole() -> None:
    """Both APIs have them, each in its own form."""

    async def test(server: Served) -> None:
        body: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
        more = {**body, "logprobs": True, "top_logprobs": 2}
        whole = (await server.chat(**more)).json()["choices"][0]["logprobs"]["content"]
        assert [2] * len(whole) == [len(token["top_logprobs"]) for token in whole]
        events = _events(await server.chat(**more, stream=True))
        parts = [event["choices"][0]["logprobs"] for event in events]
        assert whole == [token for part in parts if part for token in part["content"]]
        more = {"prompt": "abc", **body, "logprobs": 2}
        found = (await server.complete(**more)).json()["choices"][0]["logprobs"]
        events = _events(await server.complete(**more, stream=True))
        parts = [event["choices"][0]["logprobs"] for event in events]
        for name, values in found.items():
            assert values == [value for part in parts if part for value in part[name]]

    serve_and(test)


def test_a_full_queue_says_when_to_come_again(patch: pytest.MonkeyPatch) -> None:
    """Calls count from their arrival on, while nothing of them is read yet."""
    released = threading.Event()

    async def test(server: Served) -> None:
        intake = server.service.intake
        read = intake._read

        def read_later(*arguments: Any) -> Any:
            released.wait(20)
            return read(*arguments)

        patch.setattr(intake, "_read", read_later)
        calls = [asyncio.create_task(server.complete(prompt="Hi")) for _ in range(3)]
        done, _ = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (answer,) = [call.result() for call in done]
        assert "rate_limit_error" == _error(answer, 429)["type"]
        assert int(answer.headers["retry-after"]) >= 1
        released.set()
        assert [200, 200, 429] == sorted([(await call).status_code for call in calls])
        assert 200 == (await server.complete(prompt="Hi", n=2)).status_code

    try:
        serve_and(test, max_live=2)
    finally:
        released.set()


def test_more_answers_than_the_server_ever_takes_are_refused() -> None:
    """To come again later wouldn't help, so the call itself is wrong."""

    async def test(server: Served) -> None:
        error = _error(await server.complete(prompt="Hi", n=3), 400)
        assert ("n", "invalid_request_error") == (error["param"], error["type"])
        assert 0 == server.service.live_count

    serve_and(test, max_live=2)


def test_a_key_is_needed_where_there_are_keys() -> None:
    """Only the health of the server is for everybody."""

    async def test(server: Served) -> None:
        get = server.client.get
        assert 200 == (await get("/health")).status_code
        for path in ("/v1/models", "/metrics"):
            for header in ("", "Bearer other", KEYS[0]):
                answer = await get(path, headers={"authorization": header})
                assert "authentication_error" == _error(answer, 401)["type"]
            for key in KEYS:
                answer = await get(path, headers={"authorization": f"Bearer {key}"})
                assert 200 == answer.status_code

    serve_and(test, keys=KEYS)


def test_a_tenant_sees_no_prefix_hits_of_another() -> None:
    """What a tenant asked is cached for that tenant alone."""

    async def test(server: Served) -> None:
        async def cached(key: str) -> int:
            server.client.headers["authorization"] = f"Bearer {key}"
            answer = (await server.complete(prompt="abcdefgh" * 40, max_tokens=1)).json()
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [0, 0] == [await cached(key) for key in KEYS]
        assert all([await cached(key) > 0 for key in KEYS])

    serve_and(test, keys=KEYS)


def test_what_a_server_left_is_the_tenant_s_who_asked(tmp_path: Path) -> None:
    """The same call of another tenant begins anew, and leaves what is there for its own."""
    body = {"prompt": "Once upon", "max_tokens": 300, "temperature": 0.8, "seed": 5}

    async def leave(server: Served) -> None:
        server.client.headers["authorization"] = f"Bearer {KEYS[0]}"
        call = asyncio.create_task(server.complete(**body))
        while server.service.loop.stats.new_tokens < 10:
            await asyncio.sleep(0.01)
        assert 1 == await asyncio.wrap_future(server.service.loop.suspend("left"))
        assert "request_ended" == _error(await call, 503)["code"]

    async def go_on(server: Served) -> None:
        async def resumed(key: str) -> int:
            server.client.headers["authorization"] = f"Bearer {key}"
            found: int = (await server.complete(**body)).json()["usage"]["kvtide"]["resumed_tokens"]
            return found

        assert 0 == await resumed(KEYS[1])
        assert await resumed(KEYS[0]) >= 10

    for step in (leave, go_on):
        serve_and(step, keys=KEYS, disk_dir=tmp_path, disk_memory_bytes=1 << 30)


def test_a_prompt_without_room_is_refused() -> None:
    """In a stream, too, the status says so."""

    async def test(server: Served) -> None:
        for stream in (False, True):
            answer = await server.complete(prompt="a" * 600, stream=stream)
            assert "request_refused" == _error(answer, 400)["code"]
        assert 200 == (await server.complete(prompt="a")).status_code

    serve_and(test)


def test_a_failed_step_costs_the_requests_that_were_in_it(patch: pytest.MonkeyPatch) -> None:
    """Later ones are answered."""

    async def test(server: Served) -> None:
        forward, calls = server.engine._model.forward, []

        def fail_once(step: Any) -> Any:
            calls.append(step)
            if len(calls) == 2:
                raise RuntimeError("a secret prompt")
            return forward(step)

        patch.setattr(server.engine._model, "forward", fail_once)
        error = _error(await server.complete(prompt="Hi"), 500)
        assert ("server_error", "request_failed") == (error["type"], error["code"])
        assert "secret" not in error["message"]
        assert 200 == (await server.complete(prompt="Hi")).status_code

    serve_and(test)


def test_another_host_is_refused_without_keys() -> None:
    """A name that leads here by the tricks of a web page isn't the server's."""

    async def test(server: Served) -> None:
        get = server.client.get
        for host in ("localhost:80", "127.0.0.1", "[::1]:8000", "a.localhost"):
            assert 200 == (await get("/health", headers={"host": host})).status_code
        for host in ("example.com", "127.0.0.1.example.com", "10.0.0.1", ""):
            _error(await get("/health", headers={"host": host}), 403)
        for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8000"):
            assert 200 == (await get("/health", headers={"origin": origin})).status_code
        for origin in ("https://example.com", "null", "http://localhost.example.com", "x"):
            _error(await get("/health", headers={"origin": origin}), 403)

    serve_and(test)


def test_metrics_count_what_happened() -> None:
    """Each answer has a time to its first token."""

    async def test(server: Served) -> None:
        await server.complete(prompt="Hi", max_tokens=4, n=2)
        await server.client.get("/nothing")
        text = (await server.client.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert "2.0" == lines["kvtide:time_to_first_token_seconds_count"]
        assert "2.0" == lines['kvtide:ended_requests_total{how="done"}']
        assert "8.0" == lines["kvtide:new_tokens_total"]
        assert "512.0" == lines["kvtide:pool_tokens"]
        assert "1.0" == lines['kvtide:responses_total{route="/v1/completions",status="200"}']
        assert "1.0" == lines['kvtide:responses_total{route="other",status="404"}']
        assert "0.0" == lines['kvtide:misses_total{reason="damaged"}']

    serve_and(test)
