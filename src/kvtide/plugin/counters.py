"""Counters: a keeper's counts of its moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Counters:
    """Counts so far on this rank. Seconds are the time for which the scheduler was blocked."""

    saves: int = 0
    restores: int = 0
    discards: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_s: float = 0.0
    restore_s: float = 0.0
    refused_saves: Counter[str] = field(default_factory=Counter)
    """Saves that failed, by `refusals.reason_of` the error."""
    failed_restores: Counter[str] = field(default_factory=Counter)
    """Restores that failed, likewise."""

    @property
    def retractions(self) -> int:
        """Requests that kvtide was asked to save, whether it saved them or not."""
        return self.saves + self.refused_saves.total()

    def saved(self, size_bytes: int, seconds: float) -> None:
        """Counts a saved request."""
        self.saves += 1
        self.saved_bytes += size_bytes
        self.save_s += seconds

    def restored(self, size_bytes: int, seconds: float) -> None:
        """Counts a restored request."""
        self.restores += 1
        self.restored_bytes += size_bytes
        self.restore_s += seconds
