"""How far a run is: what is done, at what rate, since when, and for how long still."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request

_RATE_WINDOW_S = 5.0
_EARLY_S = 60.0


class Progress:
    """A phase of some requests, such as `answering`. Times are in seconds, of one clock."""

    def __init__(self, title: str, requests: Sequence[Request], now: float) -> None:
        self.title = title
        self.total = len(requests)
        self.done = 0
        self.rate = TokenRate()
        self._started = self._now = now
        self._new_tokens = 0
        self._open_tokens = sum(request.params.max_new_tokens for request in requests)
        self._ended = self._ended_tokens = self._stopped = 0

    def add(self, now: float, stats: EngineStats, finished: Sequence[Request]) -> None:
        """Notes a step of the engine, and the requests that it finished."""
        self._now = now
        self._new_tokens = stats.new_tokens
        self.rate.add(now, stats.new_tokens)
        self.done += len(finished)
        for request in finished:
            self._open_tokens -= request.params.max_new_tokens
            self._ended_tokens += len(request.output_ids)
            self._ended += request.error is None
            self._stopped += request.finish_reason == "stop"

    @property
    def elapsed_s(self) -> float:
        """The time since the phase began, at the last step."""
        return self._now - self._started

    @property
    def left_s(self) -> float | None:
        """An estimate; None until an answer has ended or a minute has passed.

        Before that the first prompts take most of the time, and the answers seem slow.
        It takes each token to end an answer as often as a token did so far, and no answer to go
        past its limit. Judging by the answers that have ended would be wrong, as short ones end
        first.
        """
        is_early = self._ended == 0 and self.elapsed_s < _EARLY_S
        if is_early or self._new_tokens <= 0 or self.elapsed_s <= 0:
            return None
        open_count = self.total - self.done
        if open_count == 0:
            return 0.0
        under_way = self._new_tokens - self._ended_tokens
        tokens = limit = max(1.0, (self._open_tokens - under_way) / open_count)
        if self._stopped:
            mean = self._new_tokens / self._stopped
            tokens = mean * (1 - exp(-limit / mean))
        return open_count * tokens * self.elapsed_s / self._new_tokens

    @property
    def times(self) -> str:
        """`1:05 so far, about 3:20 left`."""
        so_far, left_s = f"{format_seconds(self.elapsed_s)} so far", self.left_s
        return so_far if left_s is None else f"{so_far}, about {format_seconds(left_s)} left"


class TokenRate:
    """Tokens per second over the last five seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, token_count: int) -> None:
        """Notes that there were `token_count` tokens in all at the time `now`, in seconds."""
        self._seen.append((now, token_count))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """The rate; 0 until two times are known."""
        if len(self._seen) < 2:
            return 0.0
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / (end - start) if end > start else 0.0


def format_seconds(seconds: float) -> str:
    """`0:05`, `12:30`, `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
