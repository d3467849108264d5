"""SpillStats: what Spill counts. TierCounts: what it counts for one tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from kvtide.errors import SnapshotDamaged, SnapshotMiss, TierFull

Reason = Literal["gone", "full", "away", "late"]


@final
@dataclass(slots=True)
class TierCounts:
    """What one tier took and gave back, and what it didn't.

    Bytes are those of snapshots that went whole. Seconds are how long that took, with all tries.
    """

    writes: int = 0
    """Snapshots that it took."""
    down_bytes: int = 0
    down_seconds: float = 0.0
    hits: int = 0
    """Snapshots that it gave back."""
    up_bytes: int = 0
    up_seconds: float = 0.0
    misses: dict[Reason, int] = field(default_factory=lambda: {"gone": 0, "away": 0, "late": 0})
    """Snapshots that it didn't give back: it has them no more, can't answer, or took too long."""
    damaged: int = 0
    """Snapshots that it had with other bytes than their seal says."""
    refused_writes: dict[Reason, int] = field(
        default_factory=lambda: {"full": 0, "away": 0, "late": 0}
    )
    """Snapshots that it didn't take: it has no room, can't answer, or took too long."""

    def took(self, size_bytes: int, seconds: float) -> None:
        """Counts a snapshot that went down."""
        self.writes += 1
        self.down_bytes += size_bytes
        self.down_seconds += seconds

    def refused(self, error: Exception) -> None:
        """Counts a snapshot that it didn't take."""
        reason = _reason_of(error)
        self.refused_writes[reason if reason in self.refused_writes else "away"] += 1

    def gave(self, size_bytes: int, seconds: float) -> None:
        """Counts a snapshot that came up."""
        self.hits += 1
        self.up_bytes += size_bytes
        self.up_seconds += seconds

    def missed(self, error: Exception) -> None:
        """Counts a snapshot that it didn't give back."""
        if isinstance(error, SnapshotDamaged):
            self.damaged += 1
            return
        reason = _reason_of(error)
        self.misses[reason if reason in self.misses else "away"] += 1


@final
@dataclass(slots=True)
class SpillStats:
    """Counts of moves between the arena and the tiers. HostArena and DiskStats have the peaks."""

    tiers: dict[str, TierCounts] = field(default_factory=dict)
    """By the tiers' names, in the order in which they are asked."""
    reads_in_time: int = 0
    """Snapshots that were read ahead, and were there when they were wanted."""
    reads_late: int = 0
    """Snapshots whose read had begun ahead, and had not ended when they were wanted."""
    waited_seconds: float = 0.0
    """How long callers waited for tiers."""

    @property
    def spills(self) -> int:
        """Snapshots that a tier took."""
        return sum(counts.writes for counts in self.tiers.values())


def _reason_of(error: Exception) -> Reason:
    if isinstance(error, SnapshotMiss):
        return "gone"
    if isinstance(error, TierFull):
        return "full"
    return "late" if isinstance(error, TimeoutError) else "away"
