"""A server on a socket of this process, so that a test knows what its engine does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.request import Request
from kvtide.server.app import make_app
from kvtide.server.intake import Intake
from kvtide.server.lifecycle import open_socket, url_of
from kvtide.server.limits import ServerLimits
from kvtide.server.loop import EngineLoop
from kvtide.server.protocol import BoundedProtocol
from kvtide.server.service import Service
from kvtide.server.tenants import Tenants
from serve.harness import check_rows_once, end_answers_at, tiny, token_bytes


@dataclass
class LiveServer:
    """A server that runs; `seen` has every request that its engine had, in its order."""

    url: str
    engine: Engine
    service: Service
    seen: dict[int, Request] = field(default_factory=dict)
    most_tokens: int | None = None
    """How many an answer may have before the engine rests; None is any number."""

    def note(self, engine: Engine) -> None:
        """Notes the requests of a step. For the engine's thread."""
        for request in (*engine.scheduler.running, *engine.scheduler.retracted):
            self.seen[request.arrival] = request
            while self.most_tokens is not None and len(request.output_ids) >= self.most_tokens:
                time.sleep(0.05)
                self.service.feed.observe(engine)  # which tells what is due

    @contextlib.contextmanager
    def held_at(self, token_count: int) -> Iterator[None]:
        """Within this context the engine rests once an answer has so many tokens."""
        self.most_tokens = token_count
        try:
            yield
        finally:
            self.most_tokens = None


@contextlib.contextmanager
def live_server(pool_tokens: int, keys: tuple[str, ...] = ()) -> Iterator[LiveServer]:
    """Serves the small random model on a free port of the loopback."""
    source = tiny()
    memory = pool_tokens * token_bytes(source)
    options = EngineOptions(kv_memory_bytes=memory, host_memory_bytes=8 << 20, chunk_tokens=64)
    with pytest.MonkeyPatch.context() as patch:
        check_rows_once(patch)
        engine = Engine.build(source, options)
    end_answers_at(engine, [])  # each is as long as was asked for, whatever is drawn
    service = Service(
        loop=EngineLoop(engine),
        intake=Intake(source, "tiny-random", engine.stats.pool_tokens),
        tenants=Tenants(keys),
        limits=ServerLimits(max_live=64),
    )
    opened = open_socket("127.0.0.1", 0)
    server = LiveServer(url_of(opened), engine, service)
    service.loop.observe(server.note)
    service.loop.start()
    with contextlib.closing(opened), _serving(service, opened):
        yield server


@contextlib.contextmanager
def _serving(service: Service, opened: socket.socket) -> Iterator[None]:
    """Serves in a thread within this context."""
    config = uvicorn.Config(
        make_app(service), http=BoundedProtocol, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([opened])))
    thread.start()
    try:
        yield
    finally:
        service.feed.close()
        server.should_exit = True
        thread.join()
        service.intake.close()
        service.loop.close()
