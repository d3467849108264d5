"""The routes of `kvtide serve`: OpenAI's API, and how the server is."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvtide.server.answering import AnswerResponse, watched
from kvtide.server.errors import ApiError, json_response
from kvtide.server.limits import read_body_of
from kvtide.server.metrics import CONTENT_TYPE
from kvtide.server.noted import GONE, Noted
from kvtide.server.service import Service
from kvtide.server.tenants import Tenant
from kvtide.server.watching import add_page

T = TypeVar("T")
_PATHS = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME, "
    "GET /metrics, GET /health, GET /events and GET /"
)


def make_app(service: Service) -> FastAPI:
    """The application, over a service whose loop runs."""
    app = FastAPI(
        title="kvtide", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_middleware(Noted, service=service)
    for kind, tell in _HANDLERS.items():
        app.add_exception_handler(kind, tell)

    async def check_key(request: Request) -> None:
        tenant = service.tenants.find(request.headers.get("authorization"))
        if tenant is None:
            raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY")
        request.state.tenant = tenant

    for_tenants = [Depends(check_key)]

    @app.get("/health")
    async def health() -> Response:
        is_well = service.loop.is_alive and service.ending is None
        status = "ok" if is_well else service.ending or "the engine has ended"
        return json_response({"status": status}, status=200 if is_well else 503)

    @app.get("/metrics", dependencies=for_tenants)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models", dependencies=for_tenants)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}", dependencies=for_tenants)
    async def model(name: str) -> Response:
        service.intake.check_name(name)
        return json_response(_model(service))

    @app.post("/v1/chat/completions", dependencies=for_tenants)
    async def chat(request: Request) -> Response:
        return await _answer(service, request, is_chat=True)

    @app.post("/v1/completions", dependencies=for_tenants)
    async def complete(request: Request) -> Response:
        return await _answer(service, request, is_chat=False)

    add_page(app, service, for_tenants)
    return app


def _model(service: Service) -> dict[str, object]:
    created = service.started_at
    return {"id": service.intake.name, "object": "model", "created": created, "owned_by": "kvtide"}


async def _answer(service: Service, request: Request, *, is_chat: bool) -> Response:
    tenant: Tenant = request.state.tenant
    came_at = time.monotonic()
    with service.arriving(tenant):  # before any work is done for it
        raw = await read_body_of(request, service.limits)
        most = service.answers.most_each
        reading = service.intake.read(raw, is_chat=is_chat, tenant=tenant, most=most)
        asked = await _unless_gone(request, asyncio.ensure_future(reading))
    service.check_room(tenant, len(asked.requests))
    return AnswerResponse(service, asked, came_at)


async def _unless_gone(request: Request, reading: asyncio.Future[T]) -> T:
    """What is read, unless the client goes away. Then what has to wait isn't begun.

    Raises ClientDisconnect.
    """

    def give_up() -> None:
        reading.cancel()

    try:
        async with watched(request.receive, give_up):
            await asyncio.wait({reading})
    finally:
        reading.cancel()
    if reading.cancelled():
        raise ClientDisconnect
    return reading.result()


async def _tell_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "for this it was set"
    return error.response()


async def _tell_status(_: Request, error: Exception) -> Response:
    """Tells what the router found, such as a path that isn't there, and which paths are."""
    assert isinstance(error, HTTPException), "for this it was set"
    return ApiError(error.status_code, f"{error.detail}; there are {_PATHS}").response()


async def _tell_nobody(_: Request, error: Exception) -> Response:
    del error
    return Response(status_code=GONE)


_HANDLERS = {
    ApiError: _tell_error,
    HTTPException: _tell_status,
    ClientDisconnect: _tell_nobody,
}
