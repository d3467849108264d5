"""EngineStats: what an engine has done, and what it does now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

from kvtide.tier.counts import TierCounts


@final
@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts at one moment, and totals since the start."""

    running: int
    waiting: int
    retracted: int
    done: int
    failed: int
    cut: int
    """Requests that asked for more new tokens than the model's context leaves."""
    prompt_tokens: int
    new_tokens: int
    retractions: int
    resumes: int
    recomputed_tokens: int
    offloaded_bytes: int
    restored_bytes: int
    offload_seconds: float
    restore_seconds: float
    pool_tokens: int
    pool_tokens_used: int
    peak_pool_tokens: int
    host_limit_bytes: int
    host_bytes: int
    peak_host_bytes: int
    disk_limit_bytes: int
    disk_bytes: int
    """Bytes that snapshots take on the disk now."""
    peak_disk_bytes: int
    reads_in_time: int
    """Snapshots that were read ahead of their need, and were there in time."""
    reads_late: int
    """Snapshots that were read ahead, and were not there in time."""
    tier_wait_seconds: float
    """How long the engine waited for tiers."""
    tiers: Mapping[str, TierCounts] = field(default_factory=dict)
    """What each tier took and gave back, by the tiers' names, in the order that they are asked."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompts that weren't computed, by where their KV was: `device`, `host`, a tier."""

    misses: Mapping[str, int] = field(default_factory=dict)
    """How often a request lost its KV, by the reason: see SchedulerStats."""

    @classmethod
    def nothing(cls) -> EngineStats:
        """The stats of an engine that has done nothing."""
        zeros: dict[str, Any] = {about.name: 0 for about in fields(cls)}
        return cls(**zeros | {"tiers": {}, "cached_tokens": {}, "misses": {}})

    @property
    def spills(self) -> int:
        """How often a tier took a snapshot."""
        return sum(counts.writes for counts in self.tiers.values())
