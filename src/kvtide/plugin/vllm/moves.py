"""The moves of a rank's blocks that are under way, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from kvtide.arena import Lease
from kvtide.device import Job
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.seal import Span

Spans = list[list[Span]]
"""For each step of a move the spans that it has sealed."""


@final
@dataclass(frozen=True, slots=True)
class EndedMove:
    """A move of vLLM's that has ended, and whether all its blocks were moved."""

    job_id: int
    went_well: bool
    size_bytes: int
    seconds: float


@dataclass(slots=True)
class MovePart:
    """The share of a group in a move."""

    group: BlockGroup
    keys: list[bytes]
    job: Job[Spans]
    leases: list[Lease]


@dataclass(slots=True)
class BlockMove:
    """A move under way, in parts by groups."""

    started: float
    is_load: bool
    is_valid: Callable[[], bool] = lambda: True
    """Whether what was saved may be kept, once it is here."""
    parts: list[MovePart] = field(default_factory=list)
    has_failed: bool = False
    is_forgotten: bool = False
    """Whether a reset came meanwhile, after which nobody may use what it moves."""


@final
class FailedJob:
    """A move that couldn't begin, as a Job."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """See Job."""
        return True

    def wait(self) -> Any:
        """See Job."""
        raise self._error
