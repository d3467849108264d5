"""ResumeCounts: how much of a preempted request came back, and how much is computed again. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

from kvtide.plugin.reader import Table

READS: Table = {
    "SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        "finished_req_ids",
    ),
    "NewRequestData": ("req_id", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens", "resumed_req_ids"),
}
"""What is read of a step of vLLM's scheduler."""


@final
class ResumeCounts:
    """Follows how far each request is. One thread calls, the scheduler's."""

    def __init__(self) -> None:
        self._computed: dict[str, int] = {}
        """The most tokens of each running request whose KV was there after a step."""
        self._loaded: dict[str, int] = {}
        """How many tokens kvtide promised to a request that waits."""

    def note_load(self, req_id: str, token_count: int) -> None:
        """Says that so many tokens are about to be loaded for a request.

        vLLM says it again when a load has ended, with none: that changes nothing.
        """
        if token_count:
            self._loaded[req_id] = token_count

    def note_failure(self, req_id: str) -> None:
        """Says that a request's load failed."""
        self._loaded.pop(req_id, None)

    def note_step(self, scheduled: Any) -> Counter[str]:
        """Takes in a step, and gives what is to be counted of it, by the names of `COUNTS`."""
        counts: Counter[str] = Counter()
        cached = scheduled.scheduled_cached_reqs
        for req_id in scheduled.finished_req_ids:
            self._computed.pop(req_id, None)
            self._loaded.pop(req_id, None)
        new = [
            (request.req_id, request.num_computed_tokens)
            for request in scheduled.scheduled_new_reqs
        ]
        for req_id, found in (*new, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
            loaded = self._loaded.pop(req_id, 0)
            if req_id in cached.resumed_req_ids:
                counts["restored_tokens"] += min(loaded, found)
                counts["recomputed_tokens"] += max(0, self._computed.get(req_id, 0) - found)
            after = found + scheduled.num_scheduled_tokens.get(req_id, 0)
            self._computed[req_id] = max(after, self._computed.get(req_id, 0))
        return +counts
