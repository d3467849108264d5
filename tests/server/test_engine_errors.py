"""Errors of the engine that nobody foresaw: what they cost, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

import pytest

from kvtide.errors import KvtideError
from kvtide.server.lifecycle import open_socket, run_server
from serve.harness import check_rows_once
from support.serving import Served, make_service, serve_and

SECRET = "/a/secret/path"


@pytest.fixture(autouse=True)
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets the engines of these tests share a self-check."""
    check_rows_once(monkeypatch)
    return monkeypatch


def _fail(*_: Any) -> Any:
    raise OSError(28, SECRET)


def _fail_once(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def fail(*arguments: Any) -> Any:
        patch.setattr(owner, name, real)
        raise OSError(28, SECRET)

    patch.setattr(owner, name, fail)


def _fail_always(patch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
    for name in names:
        patch.setattr(owner, name, _fail)


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_at_a_request_costs_its_call(patch: pytest.MonkeyPatch, count: int) -> None:
    """The client and the log learn of it, without its message, and the next call is answered."""

    async def test(server: Served) -> None:
        async with asyncio.timeout(20):
            _fail_once(patch, server.engine, "add")
            answer = await server.complete(prompt="Hi", n=count)
            assert (500, "request_failed") == (answer.status_code, answer.json()["error"]["code"])
            assert SECRET not in answer.text
            assert 200 == (await server.complete(prompt="Hi", n=count)).status_code
        assert 1 == server.service.loop.failures

    serve_and(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_ends_without_another_token_ends_its_call(
    patch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Logits that aren't numbers give no token: its client hears of the end all the same."""

    async def test(server: Served) -> None:
        model = server.engine._model
        forward, steps = model.forward, itertools.count()

        def spoiled(batch: Any) -> Any:
            return forward(batch) * (1.0 if next(steps) < 3 else math.nan)

        patch.setattr(model, "forward", spoiled)
        async with asyncio.timeout(20):
            answer = await server.complete(prompt="Hi", max_tokens=9, stream=stream)
        assert (200 if stream else 500) == answer.status_code
        assert '"code":"request_failed"' in answer.text.splitlines()[-2 if stream else -1]

    serve_and(test)


def test_an_error_while_requests_are_given_up_costs_no_others(patch: pytest.MonkeyPatch) -> None:
    """After a failed step a second error is likely."""

    async def test(server: Served) -> None:
        async with asyncio.timeout(20):
            _fail_once(patch, server.engine, "step")
            real = server.engine.abort

            def abort(request_id: str) -> None:
                real(request_id)
                patch.setattr(server.engine, "abort", real)
                raise OSError(28, SECRET)

            patch.setattr(server.engine, "abort", abort)
            assert 500 == (await server.complete(prompt="Hi", n=3)).status_code
            assert 200 == (await server.complete(prompt="Hi", n=3)).status_code

    serve_and(test)


def test_an_observer_that_fails_costs_no_answer() -> None:
    """It is told no more: each step would fail again."""
    errors = BufferingHandler(100)
    errors.setLevel(logging.ERROR)

    async def test(server: Served) -> None:
        async with asyncio.timeout(20):
            server.service.loop.observe(_fail)
            for _ in range(2):
                assert 200 == (await server.complete(prompt="Hi")).status_code

    logging.getLogger().addHandler(errors)
    try:
        serve_and(test)
    finally:
        logging.getLogger().removeHandler(errors)
    (message,) = [record.getMessage() for record in errors.buffer]
    assert "an observer" in message
    assert SECRET not in message


def test_an_engine_that_cannot_go_on_ends_all_calls(patch: pytest.MonkeyPatch) -> None:
    """The calls under way, later ones and the wait for the end have an answer."""

    async def test(server: Served) -> None:
        loop = server.service.loop
        async with asyncio.timeout(20):
            _fail_always(patch, server.engine, "step", "abort", "close")
            assert 500 == (await server.complete(prompt="Hi")).status_code
            await asyncio.wrap_future(loop.ended)
            assert 503 == (await server.complete(prompt="Hi")).status_code
            assert 503 == (await server.client.get("/health")).status_code
            assert 0 == await asyncio.wrap_future(loop.suspend("the server ended"))
            with pytest.raises(RuntimeError, match="the engine has ended"):
                await asyncio.wrap_future(loop.ask(lambda engine: engine.stats))

    serve_and(test)


def test_an_error_at_the_end_keeps_nobody_waiting(patch: pytest.MonkeyPatch) -> None:
    """What was to be left in a tier is not, and its client hears so."""

    async def test(server: Served) -> None:
        async with asyncio.timeout(20):
            _fail_always(patch, server.engine, "suspend")
            call = asyncio.create_task(server.complete(prompt="Hi", max_tokens=400))
            while not server.service.live_calls:
                await asyncio.sleep(0.01)
            assert 0 == await asyncio.wrap_future(server.service.loop.suspend("it is kept"))
            answer = await call
            assert 503 == answer.status_code
            assert "it is kept" not in answer.text

    serve_and(test)


def test_a_server_without_its_engine_ends(patch: pytest.MonkeyPatch) -> None:
    """So what watches over the process can start it anew."""
    engine, service = make_service()

    def say(_: str) -> None:
        patch.setattr(type(engine), "stats", property(_fail))
        service.loop.ask(lambda _: None)

    with (
        contextlib.closing(open_socket("127.0.0.1", 0)) as opened,
        pytest.raises(KvtideError, match="the engine failed"),
    ):
        run_server(service, opened, drain_s=20, can_suspend=True, say=say)


def test_an_error_that_nobody_waits_for_is_logged_without_its_message() -> None:
    """It ends nothing, and what clients sent is in no line."""
    _, service = make_service()
    errors = BufferingHandler(100)

    def say(_: str) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(_fail)
        loop.call_soon(service.loop.close)

    logging.getLogger().addHandler(errors)
    try:
        with contextlib.closing(open_socket("127.0.0.1", 0)) as opened:
            run_server(service, opened, drain_s=20, can_suspend=True, say=say)
    finally:
        logging.getLogger().removeHandler(errors)
    (record,) = errors.buffer
    assert record.name.startswith("kvtide.")
    assert "OSError in _fail" in record.getMessage()
    assert record.exc_info is None
    assert SECRET not in record.getMessage()
