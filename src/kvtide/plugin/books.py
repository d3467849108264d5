"""Counters: what a keeper writes down of its moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Counters:
    """What happened so far on this rank. Seconds are how long the scheduler was held up."""

    saves: int = 0
    restores: int = 0
    discards: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_s: float = 0.0
    restore_s: float = 0.0
    refused_saves: Counter[str] = field(default_factory=Counter)
    """How many saves raised, by the reason (`refusals.reason_of`)."""
    failed_restores: Counter[str] = field(default_factory=Counter)
    """How many restores raised, by the reason."""

    @property
    def retractions(self) -> int:
        """Requests that were to be saved, whether they were or not."""
        return self.saves + self.refused_saves.total()

    def saved(self, size_bytes: int, seconds: float) -> None:
        """A request was saved."""
        self.saves += 1
        self.saved_bytes += size_bytes
        self.save_s += seconds

    def restored(self, size_bytes: int, seconds: float) -> None:
        """A request was restored."""
        self.restores += 1
        self.restored_bytes += size_bytes
        self.restore_s += seconds
