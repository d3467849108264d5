"""What a browser gets: the page, and the events for as long as somebody looks at it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

from fastapi import FastAPI, Request, Response
from fastapi.params import Depends
from starlette.types import Receive, Scope, Send

from kvtide.server.answering import STREAM_HEADERS, watched
from kvtide.server.events import Event
from kvtide.server.feed import Feed
from kvtide.server.service import Service
from kvtide.server.tenants import Tenant
from kvtide.server.webpage import live_page


def add_page(app: FastAPI, service: Service, for_tenants: Sequence[Depends]) -> None:
    """Adds the page, which has no secret, and its events, which `for_tenants` guards."""
    service.loop.observe(service.feed.observe)

    @app.get("/")
    async def page() -> Response:
        return page_response()

    @app.get("/events", dependencies=for_tenants)
    async def events(request: Request) -> Response:
        service.loop.ask(lambda _: None)  # an engine that rests since its start tells how it is
        tenant: Tenant = request.state.tenant
        return EventsResponse(service.feed, service.watchers.taken(tenant))


@final
class EventsResponse(Response):
    """Sends a watcher the events as they come, until the client goes away or the feed closes."""

    def __init__(self, feed: Feed, place: AbstractContextManager[None]) -> None:
        """The watcher has a `place` meanwhile."""
        super().__init__()
        self._feed = feed
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        del scope
        with self._place, self._feed.watching() as watcher:

            def leave() -> None:
                watcher.is_over = True
                watcher.wake()

            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            async with watched(receive, leave):
                while not watcher.is_over:
                    events = await watcher.fetch(self._feed)
                    body = "".join(f"data: {_compact(event)}\n\n" for event in events).encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def page_response() -> Response:
    """The page that shows the events, which nothing may come into from elsewhere."""
    page = live_page()
    headers = {
        "Content-Security-Policy": page.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return Response(page.text, media_type="text/html", headers=headers)


def _compact(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))
