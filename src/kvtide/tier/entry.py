"""SpillEntry: what Spill knows of a snapshot. SpillStats: what Spill counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from kvtide.arena import Lease
from kvtide.device import Job
from kvtide.snapshot import Snapshot
from kvtide.tier.retries import RetriedTier


@final
@dataclass(slots=True)
class SpillStats:
    """Counts of moves between the arena and the tiers, their bytes, and what went wrong.

    `write_seconds` and `read_seconds` are the tiers'; `waited_seconds` is how long callers waited.
    `reads_in_time` counts reads that had ended when their snapshot was wanted.
    """

    writes: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    reads_in_time: int = 0
    waited_seconds: float = 0.0
    damaged: int = 0
    missing: int = 0
    failed_writes: int = 0


@final
class SpillEntry:
    """The entry of a snapshot in the books.

    `tier` is the tier that has it, if there is one. `job` is its move, while there is one: it
    writes the snapshot, or reads it into `room`.
    """

    def __init__(self, snapshot: Snapshot, key: str) -> None:
        self.snapshot = snapshot
        self.key = key
        self.tier: RetriedTier | None = None
        self.job: Job[Any] | None = None
        self.room: Lease | None = None
        self.error: BaseException | None = None
        """The reason why it is lost."""
        self.retry_at = float("-inf")
        """When it may be written again, by the clock; set when no tier took it."""
        self.is_late = False
        """Whether a caller waited for its move up to the deadline. The move may still end."""
        self.was_read_ahead = False
        """Whether it came back to the arena before a caller needed it."""

    @property
    def is_here(self) -> bool:
        """Whether it is in the arena."""
        return not self.snapshot.lease.released

    @property
    def block_count(self) -> int:
        """How many blocks it takes, or would take."""
        return len(self.snapshot.seal.used_bytes)

    @property
    def may_leave(self) -> bool:
        """Whether it is in the arena and no move uses its memory."""
        return self.is_here and not self.snapshot.lease.in_use

    def give_away(self) -> None:
        """Gives the memory of a snapshot away, because a tier has it, too."""
        self.snapshot.is_below = True
        self.snapshot.lease.release()

    def is_due(self, now: float) -> bool:
        """Whether it can be written now."""
        is_still = self.job is None and self.tier is None
        return is_still and self.may_leave and self.retry_at <= now
