"""What plugins raise: a pool that is left to the engine, and moves that failed; a word for each."""

from __future__ import annotations

from kvtide.errors import (
    ArenaFull,
    KvtideError,
    LayoutError,
    SlotError,
    SlotsLost,
    SnapshotDamaged,
    SnapshotMiss,
)


class Refused(KvtideError):
    """A pool that kvtide leaves to the engine; the message says which, and why."""


class RankFailed(KvtideError):
    """Another rank couldn't save or restore its share, so this one doesn't either."""


class StateAhead(KvtideError):
    """A request's recurrent state has taken a step that its answer hasn't."""


class DeviceFailed(KvtideError):
    """The device, or kvtide itself, failed in the middle of a move."""


_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (ArenaFull, "arena_full"),
    (SnapshotDamaged, "damaged"),
    (SnapshotMiss, "missing"),
    (SlotError, "slots"),
    (LayoutError, "layout"),
    (StateAhead, "request"),
    (RankFailed, "other_rank"),
    (SlotsLost, "slots_lost"),
    (DeviceFailed, "device"),
)
REASONS = tuple(reason for _, reason in _REASONS)
"""All that `reason_of` gives; `request`: of a kind that can't come back. A metric's label."""


def reason_of(error: KvtideError) -> str:
    """The error of a move in a word, for counting."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "device")
