"""Errors of plugins: a pool is left to the engine, or a move failed. Each has a word for counts."""

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
    """kvtide leaves a pool to the engine; the message says which pool, and why."""


class RankFailed(KvtideError):
    """Another rank couldn't save or restore its share, so this one doesn't either."""


class StateAhead(KvtideError):
    """A request's recurrent state is a step ahead of its answer."""


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
"""All values of `reason_of`, as a metric's label. `request`: the request can't come back."""


def reason_of(error: KvtideError) -> str:
    """The word for a move's error, for counts."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "device")
