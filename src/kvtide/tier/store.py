"""Store: host memory for snapshots, and a disk below it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, final

from kvtide.arena import HostArena
from kvtide.tier.disk import DiskStats, DiskTier
from kvtide.tier.entry import SpillStats
from kvtide.tier.spill import Spill


class DiskCounts(TypedDict):
    """What a store's disk has, and what has moved."""

    disk_limit_bytes: int
    disk_bytes: int
    peak_disk_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    disk_seconds: float


@final
class Store:
    """Where requests have their KV while they have no slots: an arena, and a disk below it."""

    def __init__(
        self,
        arena: HostArena,
        disk_dir: Path | None = None,
        disk_bytes: int | None = None,
        name_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """Opens a tier of at most `disk_bytes` in the folder `disk_dir`, unless that is None.

        By default it may take a quarter of the bytes that are free there. Raises FolderInUse if
        another process uses the folder, UsageError if it can't be used. `name_of`: see Spill.
        """
        self.arena = arena
        self.disk: DiskTier | None = None
        self.spill: Spill | None = None
        if disk_dir is not None:
            if disk_bytes is None:
                disk_bytes = _free_bytes_of(disk_dir) // 4
            self.disk = DiskTier(disk_dir, limit_bytes=disk_bytes)
            self.spill = Spill(arena, [self.disk], name_of=name_of)

    def counts(self) -> DiskCounts:
        """What the disk has, and what has moved; nothing without a disk."""
        held = DiskStats() if self.disk is None else self.disk.stats
        moved = SpillStats() if self.spill is None else self.spill.stats
        return DiskCounts(
            disk_limit_bytes=held.limit_bytes,
            disk_bytes=held.used_bytes,
            peak_disk_bytes=held.peak_bytes,
            disk_written_bytes=moved.written_bytes,
            disk_read_bytes=moved.read_bytes,
            disk_seconds=moved.waited_seconds,
        )

    def close(self) -> None:
        """Waits for moves and gives the disk's folder back. Repeatable."""
        if self.spill is not None:
            self.spill.close()
        if self.disk is not None:
            self.disk.close()


def _free_bytes_of(folder: Path) -> int:
    """Free bytes of the file system that has the folder, or will have it; 0 if none can."""
    for place in (folder, folder.parent):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
