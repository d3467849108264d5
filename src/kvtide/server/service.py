"""Service: what the routes of a server share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import final

from kvtide.server.calls import Call
from kvtide.server.errors import ApiError
from kvtide.server.feed import MOST_WATCHERS, Feed
from kvtide.server.intake import Asked, Intake
from kvtide.server.limits import ServerLimits, share_of
from kvtide.server.loop import ENDED, EngineLoop
from kvtide.server.metrics import ServerMetrics
from kvtide.server.quota import Quota
from kvtide.server.tenants import Tenant, Tenants


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
    metrics: ServerMetrics = field(init=False)
    feed: Feed = field(default_factory=Feed)
    answers: Quota = field(init=False)
    """Answers under way: those that run, those that wait, and one for each call that is read."""
    watchers: Quota = field(init=False)
    """Pages that show what happens."""

    def __post_init__(self) -> None:
        """Counts from now on."""
        self.metrics = ServerMetrics(self.loop)
        count = self.tenants.count
        most = self.limits.max_live
        remedy = "try again later"
        kind = "answers under way or waiting"
        self.answers = Quota(kind, most, self.limits.most_answers(count), remedy)
        remedy = "close one of them"
        most = MOST_WATCHERS
        self.watchers = Quota("pages open", most, share_of(most, count), remedy)

    @property
    def live_count(self) -> int:
        """How many answers are under way, those that wait or are being read included."""
        return self.answers.count

    @contextmanager
    def arriving(self, tenant: Tenant) -> Iterator[None]:
        """Counts a call that is being read within this context. Raises as `check_room`."""
        self._check_open()
        with self.answers.taken(tenant):
            yield

    def check_room(self, tenant: Tenant, count: int) -> None:
        """Raises ApiError if `count` more answers are too many now."""
        self._check_open()
        self.answers.check(tenant, count)

    def _check_open(self) -> None:
        if self.ending is not None:
            raise ApiError(503, self.ending, code="server_ending", retry_after_s=5)
        if not self.loop.is_alive:
            raise ApiError(503, ENDED, code="server_ending", retry_after_s=5)

    @asynccontextmanager
    async def calling(self, asked: Asked, came_at: float) -> AsyncIterator[Call]:
        """Has the requests answered within this context; what hasn't ended with it is aborted.

        The call came at `came_at`, by `time.monotonic`.
        """
        count = len(asked.requests)
        with self.answers.taken(asked.tenant, count), self.intake.identified(asked.requests):
            call = Call(asked.requests, came_at)
            self.live_calls.add(call)
            self.loop.submit(call)
            try:
                yield call
            finally:
                self.live_calls.discard(call)
                self.metrics.note_end(call)
                if not call.has_ended:
                    self.loop.abort(call)
