"""Noted: looks at each call before the routes, who is addressed, and after them, what they say."""

from __future__ import annotations

import ipaddress
import logging
import time
from typing import final

from h11 import LocalProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtide.server.errors import ApiError, place_of
from kvtide.server.service import Service

logger = logging.getLogger("kvtide.server.calls")
GONE = 499
"""The status of a call whose client is gone, who doesn't see it."""
_UNKNOWN = "other"
_METHODS = ("GET", "HEAD", "OPTIONS", "POST")
"""The methods that a log names: a client may send any word, of any length."""
_FOREIGN = (
    "without API keys this server is for this machine alone: call it as localhost or 127.0.0.1, or "
    "start it with --api-key-file"
)


@final
class Noted:
    """Counts responses by route and status, and refuses calls of other hosts' pages.

    A browser shows pages of any host, and such a host may have its name lead here. So without API
    keys a call must name this machine as its host, and as its origin if it has one.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), GONE
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
            await send(message)

        try:
            await self._call(scope, receive, note)
        except LocalProtocolError as error:  # the client sent no HTTP meanwhile: it is gone
            logger.debug("%s", place_of(error))
        except Exception as error:
            logger.error("a call failed by a mistake of kvtide's: %s", place_of(error))
            if has_begun:
                raise  # the answer can't be whole, so the connection ends
            failed = ApiError(500, "the server failed; its log says more")
            await failed.response()(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", _UNKNOWN)
            self._service.metrics.note_response(route, status)
            seconds = time.monotonic() - started
            method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN
            logger.info("%s %s %d, %.3f s", method, route, status, seconds)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.tenants.need_keys or _is_of_here(scope):
            await self._app(scope, receive, send)
            return
        await ApiError(403, _FOREIGN).response()(scope, receive, send)


def _is_of_here(scope: Scope) -> bool:
    """Whether the host that is called, and the page that calls, if there is one, are of here."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    origins = [value for name, value in scope["headers"] if name == b"origin"]
    hosts += [origin.partition(b"://")[2] for origin in origins]
    return all(_is_loopback(host.decode("latin-1").lower()) for host in hosts)


def _is_loopback(name: str) -> bool:
    """Whether a host, which may have a port, is this machine's loopback."""
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
