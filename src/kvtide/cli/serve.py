"""`kvtide serve`: checks its options, loads the model, and serves it until a signal comes."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from socket import socket
from typing import TYPE_CHECKING

import typer

from kvtide.cli.console import make_console
from kvtide.cli.displays import make_display
from kvtide.cli.engine_options import engine_options
from kvtide.cli.options import (
    LogOptions,
    MemoryOptions,
    ServedModelOptions,
    ServerOptions,
    flattened,
)
from kvtide.cli.report import describe_check
from kvtide.cli.serving import Serving, check_schedule
from kvtide.errors import UsageError
from kvtide.sizes import parse_size

if TYPE_CHECKING:
    from kvtide.cli.display import Display
    from kvtide.serve.engine import Engine
    from kvtide.serve.models import OpenModel
    from kvtide.serve.options import EngineOptions
    from kvtide.server.limits import ServerLimits

_DRAIN_S = 30.0
_FULL_ANSWERS, _FULL_TOKENS = 8, 8192
"""Without --kv-memory the pool has room for so many answers of the model's whole context."""


@dataclass(frozen=True)
class ServeSettings:
    """The options of `kvtide serve`, parsed and checked."""

    model: str
    name: str
    dtype: str
    engine: EngineOptions
    schedule: str | None
    host: str
    port: int
    keys: tuple[str, ...]
    limits: ServerLimits
    drain_s: float
    special_tokens: bool
    quiet: bool
    log_format: str


@flattened
def serve(
    ctx: typer.Context,
    model: ServedModelOptions,
    memory: MemoryOptions,
    server: ServerOptions,
    log: LogOptions,
) -> None:
    """Serve a model by OpenAI's HTTP API; no prefix is computed twice."""
    from kvtide.server.limits import ServerLimits
    from kvtide.server.tenants import KEY_VARIABLE, read_keys

    engine = engine_options(model, memory, keep_logits=False)
    drain_s = server.drain_seconds
    if drain_s is None:
        drain_s = 0.0 if _has_tiers(engine) else _DRAIN_S
    settings = ServeSettings(
        model=model.model,
        name=server.name or PurePath(model.model).name,
        dtype=model.dtype.value,
        engine=engine,
        schedule=check_schedule(model.schedule, simulate=model.simulate),
        host=server.host,
        port=server.port,
        keys=tuple(read_keys(server.api_key_file, os.environ.get(KEY_VARIABLE))),
        limits=ServerLimits(
            max_live=engine.max_running + server.max_waiting,
            body_bytes=parse_size(server.max_body, name="--max-body"),
            max_per_key=server.max_per_key,
        ),
        drain_s=drain_s,
        special_tokens=server.special_tokens,
        quiet=log.quiet,
        log_format=log.log_format.value,
    )
    if not settings.keys and not _is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from other machines, so it needs an API key: "
            f"--api-key-file FILE, or {KEY_VARIABLE} in the environment"
        )
    _execute(settings, ctx.obj.serving)


def _execute(settings: ServeSettings, serving: Serving) -> None:
    from kvtide.server.lifecycle import open_socket

    console, as_json = make_console(), settings.log_format == "json"
    # The port is taken first: that it is in use shall not be said minutes later.
    with (
        closing(open_socket(settings.host, settings.port)) as opened,
        make_display(console, quiet=settings.quiet, as_json=as_json) as display,
    ):
        found = serving.find_model(settings.model, progress=display.load)
        if settings.engine.mooncake is not None:
            serving.check_mooncake(settings.engine.mooncake)
        display.load("loading torch", 0, None)
        serving.check_device(settings.engine.device, schedule=settings.schedule)
        display.load(f"loading {settings.name}", 0, None)
        source = serving.open_model(found, dtype=settings.dtype, progress=display.load)
        display.load("making the pool and the engine", 0, None)
        engine = _build_engine(settings, serving, source)
        display.stop()  # else the last thing that was loaded stands below the server's log
        if engine.exact_check is not None:
            display.say(describe_check(engine.exact_check), event="exact_mode")
        with _logging_to(display):
            _serve(settings, source, engine, opened, display)


def _build_engine(settings: ServeSettings, serving: Serving, source: OpenModel) -> Engine:
    from kvtide.serve.request import Request, SamplingParams

    longest = SamplingParams(max_new_tokens=source.context_limit or _FULL_TOKENS)
    requests = [Request(f"{number}", [0], longest) for number in range(_FULL_ANSWERS)]
    return serving.build_engine(source, settings.engine, requests)


def _serve(
    settings: ServeSettings, source: OpenModel, engine: Engine, opened: socket, display: Display
) -> None:
    from kvtide.server.intake import Intake
    from kvtide.server.lifecycle import run_server
    from kvtide.server.loop import EngineLoop
    from kvtide.server.service import Service
    from kvtide.server.tenants import Tenants

    pool_tokens = engine.stats.pool_tokens
    service = Service(
        loop=EngineLoop(engine),
        intake=Intake(source, settings.name, pool_tokens, special_tokens=settings.special_tokens),
        tenants=Tenants(settings.keys, settings.engine.salt),
        limits=settings.limits,
    )
    display.say(f"pool: room for {pool_tokens:,} tokens")
    run_server(
        service,
        opened,
        drain_s=settings.drain_s,
        can_suspend=_has_tiers(settings.engine),
        say=display.say,
    )
    display.say("ended")


@contextmanager
def _logging_to(display: Display) -> Iterator[None]:
    """Shows what the server logs within this context, each call in a line."""
    handler = _DisplayHandler(display)
    logger = logging.getLogger("kvtide")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _DisplayHandler(logging.Handler):
    """Shows records in a line each."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        is_loud = record.levelno >= logging.WARNING
        self._display.say(record.getMessage(), event="warning" if is_loud else "note")


def _has_tiers(engine: EngineOptions) -> bool:
    """Whether KV has a place that outlives the server."""
    return engine.disk_dir is not None or engine.mooncake is not None


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host, whatever names mean elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
