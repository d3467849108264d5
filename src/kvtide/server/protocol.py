"""The HTTP protocol of the server: uvicorn's, with patience that ends."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 60.0
"""How long a client may take to send the head of a request."""
READER_SECONDS = 60.0
"""How long a client may read nothing of what waits for it."""
AHEAD_BYTES = 512 << 10
"""How much a client may send behind a request before that is answered: two reads of a socket."""


@final
class BoundedProtocol(H11Protocol):
    """Ends connections whose client sends no request, or doesn't read its answer.

    It reads on while a request is answered: else it wouldn't notice that the client goes away.
    """

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._wait_for_request()
        connection = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # of a host that vanished nobody hears otherwise
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        _cancel(self._request_timer)
        _cancel(self._reader_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: what waits to be read has become too much."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        _cancel(self._reader_timer)
        super().resume_writing()
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    def handle_events(self) -> None:
        """See H11Protocol, which reads no more when something stands behind a request."""
        super().handle_events()
        if self.cycle is None or self.cycle.more_body:
            return
        ahead, _ = self.conn.trailing_data
        if len(ahead) > AHEAD_BYTES:
            self.transport.abort()
        elif ahead:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """See H11Protocol, which may begin with the next request here."""
        before = self.cycle
        super().on_response_complete()
        if self.cycle is before and not self.flow.write_paused:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        before = self.cycle

        def end_unless_begun() -> None:
            if self.cycle is before:
                self.transport.abort()

        _cancel(self._request_timer)
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, end_unless_begun)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
