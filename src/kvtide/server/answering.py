"""AnswerResponse: the HTTP response to a call, whole or as a stream, while its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtide.server.answers import Reply, sse_event
from kvtide.server.calls import Call
from kvtide.server.errors import ApiError, json_response
from kvtide.server.intake import Asked
from kvtide.server.service import Service

_STATUS = {"refused": 400, "failed": 500, "ended": 503}
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies pass it on as it comes
]
"""The headers of an answer that comes in events."""


@final
class AnswerResponse(Response):
    """Has a call answered, and sends the answer.

    A send waits while the reader is slow; meanwhile nothing piles up but the answer itself. When
    the client goes away its requests end within one step.
    """

    def __init__(self, service: Service, asked: Asked, came_at: float) -> None:
        """The call came at `came_at`, by `time.monotonic`."""
        super().__init__()
        self._came_at = came_at
        self._service = service
        self._asked = asked
        self._reply = Reply(asked, service.intake.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        async with self._service.calling(self._asked, self._came_at) as call:

            def give_up() -> None:
                self._service.loop.abort(call)
                call.wake()

            async with watched(receive, give_up):
                await call.change()  # the engine took the requests, or refused them
                send_answer = self._send_stream if self._asked.is_stream else self._send_whole
                if call.failure is not None:
                    await self._error_of(call).response()(scope, receive, send)
                else:
                    await send_answer(call, scope, receive, send)

    async def _send_whole(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        while not (call.has_ended or call.is_gone):
            await call.change()
        if call.failure is not None:
            response = self._error_of(call).response()
        else:
            response = json_response(self._reply.whole(call.resumed_tokens))
        if not call.is_gone:
            await response(scope, receive, send)

    async def _send_stream(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while not call.is_gone:
            # The engine's thread sets the failure first, so what has ended without one is whole.
            progress = call.progress
            has_ended = all(step.has_ended for step in progress)
            if call.failure is not None:
                has_ended, events = True, [sse_event(self._error_of(call).body)]
            else:
                events = [*self._reply.chunks(progress)]
                events += self._reply.last_chunks(call.resumed_tokens) if has_ended else ()
            if events:
                body = b"".join(events)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if has_ended:
                break
            await call.change()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error_of(self, call: Call) -> ApiError:
        failure = call.failure
        assert failure is not None, "only for calls that failed"
        message, param = failure.message, None
        if failure.kind == "refused":
            param = self._asked.fields[failure.number]
            message = f"the request for '{param}' can't be answered: {message}"
        return ApiError(
            _STATUS[failure.kind],
            message,
            code=f"request_{failure.kind}",
            param=param,
            retry_after_s=5 if failure.kind == "ended" else None,
        )


@asynccontextmanager
async def watched(receive: Receive, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_gone` if the client disconnects within this context."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
