"""kvtide moves the KV cache of LLM requests off an accelerator and back, byte for byte.

A restore gives back the same bytes, or says that it can't; never other bytes.
"""

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.errors import (
    ArenaFull,
    KvtideError,
    LayoutError,
    SlotError,
    SnapshotDamaged,
    SnapshotMiss,
    UsageError,
)
from kvtide.layout import GQA, Geometry, Layout, Plane
from kvtide.pool import PageAllocator, Pool
from kvtide.snapshot import Snapshot, Ticket
from kvtide.tide import Tide

__version__ = "0.1.0"

__all__ = [
    "GQA",
    "ArenaFull",
    "Geometry",
    "HostArena",
    "KvtideError",
    "Layout",
    "LayoutError",
    "PageAllocator",
    "Plane",
    "Pool",
    "SlotError",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotMiss",
    "Ticket",
    "Tide",
    "UsageError",
    "open_device",
]
