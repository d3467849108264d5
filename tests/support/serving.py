"""A server within the test's process, and a real one, over a small random model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from fastapi import FastAPI

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.server.app import make_app
from kvtide.server.intake import Intake
from kvtide.server.lifecycle import WebServer, open_socket, web_config
from kvtide.server.limits import ServerLimits
from kvtide.server.loop import EngineLoop
from kvtide.server.service import Service
from kvtide.server.tenants import Tenants
from serve.harness import end_answers_at, tiny, token_bytes

POOL_TOKENS = 512


@dataclass
class Served:
    """A server within this process."""

    engine: Engine
    service: Service
    app: FastAPI
    client: httpx.AsyncClient

    async def complete(self, **body: Any) -> httpx.Response:
        """Calls /v1/completions."""
        return await self.client.post("/v1/completions", json=body)

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        ids: list[int] = tiny().tokenizer(text)["input_ids"]
        return ids

    async def chat(self, text: str = "Hi", **body: Any) -> httpx.Response:
        """Calls /v1/chat/completions with a message of the user's."""
        messages = [{"role": "user", "content": text}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages, **body})


def make_service(
    *,
    keys: tuple[str, ...] = (),
    max_live: int = 64,
    body_bytes: int = 1 << 20,
    max_per_key: int | None = None,
    pool_tokens: int = POOL_TOKENS,
    **options: Any,
) -> tuple[Engine, Service]:
    """Returns the small random model's engine, and its service, whose loop isn't started."""
    source = tiny()
    memory = pool_tokens * token_bytes(source)
    engine = Engine.build(source, EngineOptions(kv_memory_bytes=memory, **options))
    end_answers_at(engine, ())  # where an answer ends shall not depend on what is drawn
    service = Service(
        loop=EngineLoop(engine),
        intake=Intake(source, "tiny", engine.stats.pool_tokens),
        tenants=Tenants(keys),
        limits=ServerLimits(max_live, body_bytes, max_per_key=max_per_key),
    )
    return engine, service


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """Serves the small random model within this process, without a socket."""
    engine, service = make_service(**settings)
    app = make_app(service)
    service.loop.start()
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield Served(engine, service, app, client)
    finally:
        service.intake.close()
        service.loop.close()


def serve_and(test: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    """Runs a test over a server within this process."""

    async def run() -> None:
        async with served(**settings) as server:
            await test(server)

    asyncio.run(run())


@dataclass
class ServerProcess:
    """A `kvtide serve` that runs."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it by a signal, and returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def server_process(
    folder: Path, *options: str, model: str | Path = "tiny-random"
) -> Iterator[ServerProcess]:
    """Starts `kvtide serve` on a free port, and waits until it listens."""
    log = folder / "server.log"
    words = [sys.executable, "-m", "kvtide", "serve", f"{model}", "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(words, stderr=file, stdout=file, env=environment, text=True)
    try:
        yield ServerProcess(process, _wait_for_url(process, log), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    while True:
        for line in log.read_text().splitlines():
            if " is served at " in line:
                return line.split(" is served at ")[1].split("/v1")[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"it ended with {process.wait(0.1)}: {log.read_text()}")


@contextlib.asynccontextmanager
async def listening(server: Served, *, send_bytes: int | None = None) -> AsyncIterator[int]:
    """Has the server's routes behind a real socket of this process; yields its port.

    The system keeps about `send_bytes` of what a client hasn't read, by default megabytes.
    """
    with contextlib.closing(open_socket("127.0.0.1", 0)) as opened:
        if send_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        started = asyncio.Event()
        web = WebServer(web_config(server.app), started.set)
        task = asyncio.create_task(web.serve(sockets=[opened]))
        await started.wait()
        try:
            yield opened.getsockname()[1]
        finally:
            web.should_exit = True
            await task


def http_request(path: str, body: object) -> bytes:
    """Returns a POST of JSON as it is on the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
