"""kvtide moves the KV cache of LLM requests off an accelerator and back, byte for byte.

A restore gives back the same bytes, or says that it can't; never other bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.arena import HostArena, arena_for
    from kvtide.device import open_device
    from kvtide.errors import (
        ArenaFull,
        KvtideError,
        LayoutError,
        ProcessForked,
        SlotError,
        SlotsLost,
        SnapshotDamaged,
        SnapshotMiss,
        TierFull,
        TierRetry,
        UsageError,
    )
    from kvtide.layout import GQA, Geometry, Layout, Plane
    from kvtide.pool import PageAllocator, Pool
    from kvtide.seal import Seal
    from kvtide.snapshot import Snapshot
    from kvtide.ticket import Ticket
    from kvtide.tide import Tide
    from kvtide.tier import DiskTier, MooncakeTier, Namespace, Tier

__version__ = "0.1.0"

__all__ = [
    "GQA",
    "ArenaFull",
    "DiskTier",
    "Geometry",
    "HostArena",
    "KvtideError",
    "Layout",
    "LayoutError",
    "MooncakeTier",
    "Namespace",
    "PageAllocator",
    "Plane",
    "Pool",
    "ProcessForked",
    "Seal",
    "SlotError",
    "SlotsLost",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotMiss",
    "Ticket",
    "Tide",
    "Tier",
    "TierFull",
    "TierRetry",
    "UsageError",
    "arena_for",
    "open_device",
]

# torch takes seconds to import, and the command line has errors to report before that.
_HOMES = {
    "kvtide.arena": ("HostArena", "arena_for"),
    "kvtide.device": ("open_device",),
    "kvtide.errors": (
        "ArenaFull",
        "KvtideError",
        "LayoutError",
        "ProcessForked",
        "SlotError",
        "SlotsLost",
        "SnapshotDamaged",
        "SnapshotMiss",
        "TierFull",
        "TierRetry",
        "UsageError",
    ),
    "kvtide.layout": ("GQA", "Geometry", "Layout", "Plane"),
    "kvtide.pool": ("PageAllocator", "Pool"),
    "kvtide.seal": ("Seal",),
    "kvtide.snapshot": ("Snapshot",),
    "kvtide.ticket": ("Ticket",),
    "kvtide.tide": ("Tide",),
    "kvtide.tier": ("DiskTier", "MooncakeTier", "Namespace", "Tier"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
