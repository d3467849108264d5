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


@final
class BoundedProtocol(H11Protocol):
    """Ends connections whose client sends no request, or doesn't read its answer."""

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._patience: asyncio.TimerHandle | None = None
        self._wait_for_request()
        connection = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # of a host that vanished nobody hears otherwise
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: what waits to be read has become too much."""
        super().pause_writing()
        self._wait(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        before = self.cycle

        def end_unless_begun() -> None:
            if self.cycle is before:
                self.transport.abort()

        self._wait(REQUEST_SECONDS, end_unless_begun)

    def _wait(self, seconds: float, then: Any) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
