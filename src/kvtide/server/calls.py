"""Calls: what clients asked for, and how far the answers are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from kvtide.serve.request import Request


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no answer: the engine doesn't take it, failed at it, or has ended."""

    kind: Literal["refused", "failed", "ended"]
    message: str
    number: int = 0
    """Which of the call's requests was refused."""


@final
@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a request was after a step. Nothing of it changes any more."""

    text: str = ""
    token_count: int = 0
    finish_reason: str | None = None
    """How it ended: `finish_reason` of its request."""
    error: str | None = None
    cached_tokens: int = 0
    retractions: int = 0
    new_count: int = 0
    """How many of its tokens this engine made: the others were left by an earlier one."""
    first_at: float | None = None
    """When it had the first of these, by `time.monotonic`."""
    last_at: float | None = None
    """When it had the last one."""

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete, or there will be none."""
        return self.finish_reason is not None


@final
class Call:
    """The requests of a client's call, which end together, and how far they are.

    Made and waited for in an asyncio loop; the engine's thread publishes.
    """

    def __init__(self, requests: Sequence[Request], came_at: float) -> None:
        """The call came at `came_at`, by `time.monotonic`."""
        self.requests = tuple(requests)
        self.progress = tuple(Progressed() for _ in requests)
        """How far each request was after the last step."""
        self.failure: Failure | None = None
        """Why there is no answer; None while there may be one."""
        self.resumed = tuple(0 for _ in requests)
        """How many tokens of each answer an earlier engine had left in a tier."""
        self.is_gone = False
        """Whether nobody wants the answers any more."""
        self.came_at = came_at
        self._asyncio_loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    @property
    def resumed_tokens(self) -> int:
        """How many tokens of all answers an earlier engine had left."""
        return sum(self.resumed)

    @property
    def has_ended(self) -> bool:
        """Whether all answers have ended."""
        return all(progress.has_ended for progress in self.progress)

    @property
    def has_news(self) -> bool:
        """Whether a request has another token, or has ended, since `publish` told of it.

        For the engine's thread.
        """
        known = zip(self.requests, self.progress, strict=True)
        return any(
            len(request.output_ids) != before.token_count
            or request.finish_reason != before.finish_reason
            for request, before in known
        )

    async def change(self) -> None:
        """Waits until there is something new since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Ends the wait of `change`. For the asyncio loop's thread."""
        self._changed.set()

    def begin(self) -> None:
        """Tells that the engine has the requests, and what it found of them. For its thread."""
        self.resumed = tuple(len(request.output_ids) for request in self.requests)
        self.publish()

    def publish(self) -> None:
        """Takes over how far the requests are. For the engine's thread."""
        now = time.monotonic()
        self.progress = tuple(
            _progressed(request, before, resumed, now)
            for request, before, resumed in zip(
                self.requests, self.progress, self.resumed, strict=True
            )
        )
        error = next((request.error for request in self.requests if request.error), None)
        if self.failure is None and error is not None:
            self.failure = Failure("failed", error)
        self._tell()

    def fail(self, failure: Failure) -> None:
        """Ends all answers that haven't ended with an error. For the engine's thread."""
        self.failure = failure
        for request in self.requests:
            if request.finish_reason in (None, "abort"):
                request.finish_reason, request.error = "error", failure.message
        self.publish()

    def _tell(self) -> None:
        try:
            self._asyncio_loop.call_soon_threadsafe(self.wake)
        except RuntimeError:  # the asyncio loop is closed, so nobody waits
            self.is_gone = True


def _progressed(request: Request, before: Progressed, resumed: int, now: float) -> Progressed:
    token_count = len(request.output_ids)
    new_count = token_count - resumed
    return Progressed(
        text=request.text,
        token_count=token_count,
        finish_reason=request.finish_reason,
        error=request.error,
        cached_tokens=request.cached_tokens,
        retractions=request.retractions,
        new_count=new_count,
        first_at=before.first_at or now if new_count else None,
        last_at=now if new_count > before.new_count else before.last_at,
    )
