"""What became of the prompts of a run, and of the requests that its engine got."""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.cli.answers.base import Kept
from kvtide.prompts import Prompt

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request
    from kvtide.serve.selfcheck import RowCheck
    from kvtide.server.events import Event


@dataclass(frozen=True, eq=False)
class Work:
    """A prompt with its requests, which the engine changes in place, and its answer's key."""

    prompt: Prompt
    requests: Sequence[Request]
    key: str

    @property
    def has_ended(self) -> bool:
        """Whether all its requests ended, with answers or errors."""
        return all(request.finish_reason not in (None, "abort") for request in self.requests)

    @property
    def has_failed(self) -> bool:
        """Whether one of its requests ended with an error."""
        return any(request.error is not None for request in self.requests)


@dataclass(frozen=True)
class Outcome:
    """What became of requests that were given to an engine; `seconds` is wall time.

    `ended_by` is the signal that asked for the end, and `error` what ended the run instead.
    """

    requests: Sequence[Request]
    stats: EngineStats
    seconds: float
    exact_check: RowCheck | None
    ended_by: signal.Signals | None = None
    error: Exception | None = None
    suspended: int = 0
    """How many requests have their KV in tiers, for a later run that goes on with them."""
    events: Sequence[Event] = ()
    """What happened when, if that was recorded."""

    @classmethod
    def nothing(cls) -> Outcome:
        """The outcome if there was nothing to do."""
        from kvtide.serve.engine import EngineStats

        return cls([], EngineStats.nothing(), 0.0, None)


@dataclass(frozen=True)
class PromptCounts:
    """Numbers of prompts: all, and those kept from earlier runs, which are answered too."""

    prompts: int
    kept: int
    answered: int
    failed: int


@dataclass(frozen=True)
class Answered:
    """What became of all prompts, and of the requests that the engine got.

    `written` are the ids of the prompts whose lines were written in this run.
    """

    works: Sequence[Work]
    kept: Kept
    written: Set[str]
    outcome: Outcome

    @property
    def left(self) -> list[Work]:
        """The work that was done in this run."""
        return [work for work in self.works if work.prompt.id not in self.kept.lines]

    @property
    def is_complete(self) -> bool:
        """Whether nothing ended the run early."""
        return self.outcome.ended_by is None and self.outcome.error is None

    @property
    def counts(self) -> PromptCounts:
        """How many prompts were answered, and how many not."""
        failed = sum(work.has_failed for work in self.works if work.prompt.id in self.written)
        return PromptCounts(
            prompts=len(self.works),
            kept=len(self.kept.lines),
            answered=len(self.kept.lines) + len(self.written) - failed,
            failed=failed,
        )
