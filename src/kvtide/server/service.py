"""Service: what the routes of a server share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import final

from kvtide.server.calls import Call
from kvtide.server.errors import ApiError
from kvtide.server.feed import Feed
from kvtide.server.intake import Asked, Intake
from kvtide.server.limits import ServerLimits
from kvtide.server.loop import ENDED, EngineLoop
from kvtide.server.metrics import ServerMetrics
from kvtide.server.tenants import Tenants


@final
@dataclass
class Service:
    """A loop that runs, and what stands before it. For the asyncio loop's thread alone."""

    loop: EngineLoop
    intake: Intake
    tenants: Tenants
    limits: ServerLimits
    started_at: int = field(default_factory=lambda: int(time.time()))
    """The time of the start, in seconds since 1970."""
    ending: str | None = None
    """Why no new request is taken; None while the server goes on."""
    live_calls: set[Call] = field(default_factory=set)
    arriving_count: int = 0
    """How many calls are being read, each with one answer at least."""
    metrics: ServerMetrics = field(init=False)

    def __post_init__(self) -> None:
        """Counts from now on."""
        self.metrics = ServerMetrics(self.loop)

    feed: Feed = field(default_factory=Feed)

    @property
    def live_count(self) -> int:
        """How many answers are under way, those that wait or are being read included."""
        return self.arriving_count + sum(len(call.requests) for call in self.live_calls)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Counts a call that is being read within this context. Raises as `check_room`."""
        self.check_room(1)
        self.arriving_count += 1
        try:
            yield
        finally:
            self.arriving_count -= 1

    def check_room(self, count: int) -> None:
        """Raises ApiError if `count` more answers are too many now."""
        if self.ending is not None:
            raise ApiError(503, self.ending, code="server_ending", retry_after_s=5)
        if not self.loop.is_alive:
            raise ApiError(503, ENDED, code="server_ending", retry_after_s=5)
        if self.live_count + count > self.limits.max_live:
            raise ApiError(
                429,
                f"{self.live_count} answers are under way or wait, and this server takes "
                f"{self.limits.max_live} at once; try again later",
                code="queue_full",
                retry_after_s=1,
            )

    @asynccontextmanager
    async def calling(self, asked: Asked) -> AsyncIterator[Call]:
        """Has the requests answered within this context; what hasn't ended with it is aborted."""
        with self.intake.identified(asked.requests):
            call = Call(asked.requests)
            self.live_calls.add(call)
            self.loop.submit(call)
            try:
                yield call
            finally:
                self.live_calls.discard(call)
                self.metrics.note_end(call)
                if not call.has_ended:
                    self.loop.abort(call)
