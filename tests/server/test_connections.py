"""Clients that go away, read slowly or send slowly, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest

from kvtide.serve.engine import Engine
from kvtide.server import protocol
from serve.harness import check_rows_once
from support.serving import Served, http_request, listening, serve_and

LONG: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 480, "temperature": 0, "stream": True}
_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def _shared_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows_once(monkeypatch)


async def _until(holds: Any) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def _start(port: int, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http_request("/v1/completions", body))
    return reader, writer


async def _freed(server: Served) -> None:
    """Waits for the next pause between two steps, and checks that nobody holds a slot."""

    def check(engine: Engine) -> None:
        assert not engine.has_work
        assert 0 == engine.pages.held_count

    await asyncio.wrap_future(server.service.loop.ask(check))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_all_within_a_step(stream: bool, tmp_path: Path) -> None:
    """Slots, host memory and files, of requests that run, wait and were retracted."""

    async def test(server: Served) -> None:
        async with listening(server) as port:
            connections = [await _start(port, {**LONG, "stream": stream}) for _ in range(5)]
            disk = server.engine.store.disk
            assert disk is not None
            await _until(lambda: server.service.loop.stats.retracted and disk.stats.used_bytes)
            for _, writer in connections:
                writer.transport.abort()
            await _until(lambda: not server.service.live_calls)
            await _freed(server)
            assert server.service.loop.stats.new_tokens < 5 * LONG["max_tokens"]
            # A file that is being written is removed when that has ended, and nobody asks.
            await _until(lambda: not (disk.stats.used_bytes or server.engine.tide.arena.used_bytes))

    settings = {"disk_dir": tmp_path, "disk_memory_bytes": 1 << 30, "share_prefixes": False}
    serve_and(test, host_memory_bytes=400_000, **settings)


def test_a_reader_who_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end, and others are answered meanwhile."""
    monkeypatch.setattr(protocol, "READER_SECONDS", 0.2)

    async def test(server: Served) -> None:
        async with listening(server, send_bytes=4096) as port:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", port))
            with contextlib.closing(slow):
                body = {**LONG, "n": 4, "logprobs": 20}
                slow.sendall(http_request("/v1/completions", body))
                await _until(lambda: server.service.live_calls)
                answer = await server.complete(prompt="Hi", max_tokens=3)
                assert 200 == answer.status_code
                await _until(lambda: not server.service.live_calls)
                slow.settimeout(20)
                parts = [*iter(lambda: slow.recv(1 << 16), b"")]
                assert b"[DONE]" not in b"".join(parts)

    serve_and(test, pool_tokens=4096)


def test_bytes_after_a_request_that_are_none_end_the_connection() -> None:
    """The client made the mistake, so the log has no error, and others are answered."""
    errors = BufferingHandler(100)
    errors.setLevel(logging.WARNING)

    async def test(server: Served) -> None:
        async with listening(server) as port, asyncio.timeout(20):
            for body in ({**LONG, "stream": False}, LONG, {}):
                reader, writer = await _start(port, body)
                await asyncio.sleep(0)
                writer.write(b"GARBAGE\r\n\r\n")
                while await reader.read(1 << 16):
                    pass
                writer.close()
            await _until(lambda: not server.service.live_calls)
            assert 200 == (await server.complete(prompt="Hi", max_tokens=3)).status_code

    logging.getLogger().addHandler(errors)
    try:
        serve_and(test)
    finally:
        logging.getLogger().removeHandler(errors)
    assert [] == [record.getMessage() for record in errors.buffer]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"])
def test_a_client_without_a_request_is_left(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have sent nothing, or half of a head."""
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)

    async def test(server: Served) -> None:
        async with listening(server) as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert b"" == await reader.read()
            writer.close()

    serve_and(test)


def test_a_request_right_behind_another_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience with clients that send nothing doesn't end what is being answered."""
    released = threading.Event()

    async def test(server: Served) -> None:
        async with listening(server) as port, asyncio.timeout(20):
            server.service.loop.ask(lambda _: released.wait(20))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.1)
            writer.write(_HEALTH + http_request("/v1/completions", LONG))
            await _until(lambda: server.service.live_calls)
            await asyncio.sleep(0.3)
            released.set()
            assert (await reader.readuntil(b"data: [DONE]")).endswith(b"[DONE]")
            writer.close()

    serve_and(test)


def test_a_client_that_was_slow_once_has_no_more_time_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The patience with a reader and that with a request don't end each other."""
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 2)

    async def test(server: Served) -> None:
        async with listening(server, send_bytes=4096) as port, asyncio.timeout(20):
            body = {**LONG, "stream": False, "n": 4, "logprobs": 20}
            reader, writer = await _start(port, body)
            transport: Any = writer.transport
            transport.pause_reading()
            await _until(lambda: server.service.live_calls)
            await _until(lambda: not server.service.live_calls)
            transport.resume_reading()
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
            writer.write(b"GET / HTTP/1.1\r\nHost: local")
            with contextlib.suppress(ConnectionResetError):
                assert b"" == await reader.read()
            writer.close()

    serve_and(test, pool_tokens=4096)


def test_what_a_client_that_is_gone_sent_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body waited while another one was read, and its place is free at once."""
    released, read = threading.Event(), list[bytes]()

    async def test(server: Served) -> None:
        intake = server.service.intake
        read_now = intake._read

        def read_later(raw: bytes, *more: Any) -> Any:
            read.append(raw)
            released.wait(20)
            return read_now(raw, *more)

        monkeypatch.setattr(intake, "_read", read_later)
        async with listening(server) as port, asyncio.timeout(20):
            reader, first = await _start(port, {"prompt": "first", "max_tokens": 1})
            await _until(lambda: read)
            _, second = await _start(port, {"prompt": "second"})
            await _until(lambda: server.service.live_count == 2)
            second.transport.abort()
            await _until(lambda: server.service.live_count == 1)
            released.set()
            assert b" 200 " in await reader.readline()
            assert 200 == (await server.complete(prompt="third", max_tokens=1)).status_code
            first.close()
        assert [b"first", b"third"] == [json.loads(raw)["prompt"].encode() for raw in read]

    try:
        serve_and(test)
    finally:
        released.set()


@pytest.mark.parametrize("more", [b"GET", _HEALTH, 8 * _HEALTH, b"GET /" + (1 << 21) * b"x"])
def test_a_client_that_sent_more_and_goes_away_is_noticed(more: bytes) -> None:
    """What stands behind a call in the connection doesn't hide the end of it."""
    released = threading.Event()

    async def test(server: Served) -> None:
        async with listening(server) as port, asyncio.timeout(20):
            server.service.loop.ask(lambda _: released.wait(20))
            _, writer = await _start(port, {**LONG, "stream": False})
            await _until(lambda: server.service.live_calls)
            (call,) = server.service.live_calls
            writer.write(more)
            await asyncio.sleep(0.1)
            writer.transport.abort()
            await _until(lambda: call.is_gone)
            released.set()

    try:
        serve_and(test)
    finally:
        released.set()
