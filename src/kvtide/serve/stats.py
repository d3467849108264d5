"""EngineStats: what an engine has done, and what it does now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


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
    disk_limit_bytes: int = 0
    disk_bytes: int = 0
    """Bytes that snapshots take on the disk now."""
    peak_disk_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_seconds: float = 0.0
    """How long the engine waited for the disk."""
