"""Starts the server, and ends it in good order when a signal says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, final

import uvicorn
from fastapi import FastAPI

from kvtide.errors import KvtideError, UsageError
from kvtide.server.app import make_app
from kvtide.server.errors import place_of
from kvtide.server.loop import CUT
from kvtide.server.protocol import BoundedProtocol
from kvtide.server.service import Service
from kvtide.sizes import counted

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDING = "the server is ending and takes no new requests; send this again in a moment"
LEFT = "the server ended; send the same request again, and it goes on from what could be kept"
_BACKLOG = 2048
Say = Callable[[str], None]


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to host and port, and doesn't listen yet.

    Raises UsageError if they can't be had, before a model is loaded in vain.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}; name another") from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --port "
            "(0 is any free one)"
        ) from error
    return opened


def url_of(opened: socket.socket) -> str:
    """The address of a server on this socket, as a client uses it."""
    host, port = opened.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_server(
    service: Service, opened: socket.socket, *, drain_s: float, can_suspend: bool, say: Say
) -> None:
    """Serves until a signal ends it; closes what the service has. Blocks.

    Requests under way then have `drain_s` to end. The rest goes to tiers if `can_suspend`. Raises
    KvtideError if the engine ended by itself, which ends the server, too.
    """
    _allow_many_files()
    service.loop.start()
    try:
        asyncio.run(_serve(service, opened, drain_s=drain_s, can_suspend=can_suspend, say=say))
    finally:
        service.intake.close()
        service.loop.close()
    if service.loop.has_failed:
        raise KvtideError(
            "the engine failed and can't go on; the log says where. Start the server again"
        )


async def _serve(
    service: Service, opened: socket.socket, *, drain_s: float, can_suspend: bool, say: Say
) -> None:
    asyncio.get_running_loop().set_exception_handler(_note_mistake)
    name, url = service.intake.name, url_of(opened)
    server = WebServer(
        web_config(make_app(service)),
        lambda: say(f"{name} is served at {url}/v1, and shown at {url}; Ctrl-C ends it"),
    )
    signals = _Signals(asyncio.get_running_loop())
    serving = asyncio.create_task(server.serve(sockets=[opened]))
    with signals.handled():
        ended = asyncio.create_task(signals.next())
        gone = asyncio.wrap_future(service.loop.ended)
        first: list[asyncio.Future[Any]] = [serving, ended, gone]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not (serving.done() or gone.done()):
            await _drain(service, signals, drain_s, say)
            left_count = await asyncio.wrap_future(
                service.loop.suspend(LEFT if can_suspend else CUT)
            )
            if left_count:
                say(f"left for the next start: {counted(left_count, 'request')}")
        service.feed.close()
        ended.cancel()
        server.should_exit = True
        await serving


def _note_mistake(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that nobody waits for. asyncio would show all of it, with what clients sent."""
    error = context.get("exception")
    where = place_of(error) if isinstance(error, Exception) else "asyncio doesn't say where"
    logger.error("a task of the server failed by a mistake of kvtide's: %s", where)


async def _drain(service: Service, signals: _Signals, drain_s: float, say: Say) -> None:
    """Waits until no request is under way, for `drain_s` at most, or for a second signal."""
    service.ending = ENDING
    count = service.live_count
    if not count:
        return
    say(
        f"ending: {counted(count, 'request')} under way, with {drain_s:g} s to end; a second "
        "signal ends them now"
    )
    again = asyncio.create_task(signals.next())
    deadline = asyncio.get_running_loop().time() + drain_s
    while service.live_calls and not again.done():
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            break
        await asyncio.wait({again}, timeout=min(left_s, 0.05))
    again.cancel()


def web_config(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # below that it shows what clients sent
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=5,
    )


def _allow_many_files() -> None:
    """Raises the limit of open files to the most that is allowed: a connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@final
class WebServer(uvicorn.Server):
    """uvicorn's server, which leaves signals alone, and says that it listens."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server."""
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


@final
class _Signals:
    """The signals that end the server, one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._came: asyncio.Queue[signal.Signals] = asyncio.Queue()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Within this context they only count. One that was ignored at the start stays so."""
        taken = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        for number in taken:
            self._loop.add_signal_handler(number, self._came.put_nowait, number)
        try:
            yield
        finally:
            for number in taken:
                self._loop.remove_signal_handler(number)

    async def next(self) -> signal.Signals:
        """Waits for the next one."""
        return await self._came.get()
