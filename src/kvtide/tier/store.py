"""Store: host memory for snapshots, and the tiers below it: a disk, a Mooncake store, or both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TypedDict, final

from kvtide.arena import HostArena
from kvtide.tier.counts import SpillStats, TierCounts
from kvtide.tier.disk import DiskStats, DiskTier
from kvtide.tier.mooncake import MooncakeTier
from kvtide.tier.mooncake_settings import MooncakeSettings
from kvtide.tier.names import ASIDE_FORM, FILE_FORM
from kvtide.tier.spill import Spill


class StoreCounts(TypedDict):
    """What a store's disk has, and what has moved."""

    disk_limit_bytes: int
    disk_bytes: int
    peak_disk_bytes: int
    reads_in_time: int
    reads_late: int
    tier_wait_seconds: float
    tiers: dict[str, TierCounts]


@final
class Store:
    """Where requests have their KV while they have no slots: an arena, and the tiers below it.

    A snapshot without room in the arena goes to the disk, and one that the disk doesn't take to the
    Mooncake store.
    """

    def __init__(
        self,
        arena: HostArena,
        disk_dir: Path | None = None,
        disk_bytes: int | None = None,
        *,
        mooncake: MooncakeSettings | None = None,
        name_of: Callable[[str], str | None] = lambda _: None,
        deadline_s: float = 60.0,
    ) -> None:
        """Opens a tier of at most `disk_bytes` in the folder `disk_dir`, unless that is None.

        By default it may take a quarter of the bytes that are free there. Joins the store of
        `mooncake`, unless that is None. Raises FolderInUse if another process uses the folder,
        UsageError if a tier can't be used. `name_of`, `deadline_s`: see Spill.
        """
        self.arena = arena
        self.disk: DiskTier | None = None
        self.mooncake: MooncakeTier | None = None
        self.spill: Spill | None = None
        try:
            if disk_dir is not None:
                if disk_bytes is None:
                    disk_bytes = default_disk_bytes(disk_dir)
                self.disk = DiskTier(disk_dir, limit_bytes=disk_bytes, keeps_used=True)
            if mooncake is not None:
                self.mooncake = MooncakeTier(mooncake)
        except BaseException:
            self.close()
            raise
        tiers = [tier for tier in (self.disk, self.mooncake) if tier is not None]
        if tiers:
            self.spill = Spill(arena, tiers, name_of=name_of, deadline_s=deadline_s)

    def counts(self) -> StoreCounts:
        """What the disk has, and what has moved, at this moment."""
        held = DiskStats() if self.disk is None else self.disk.stats
        moved = SpillStats() if self.spill is None else self.spill.stats
        return StoreCounts(
            disk_limit_bytes=held.limit_bytes,
            disk_bytes=held.used_bytes,
            peak_disk_bytes=held.peak_bytes,
            reads_in_time=moved.reads_in_time,
            reads_late=moved.reads_late,
            tier_wait_seconds=moved.waited_seconds,
            tiers=deepcopy(moved.tiers),
        )

    def close(self) -> None:
        """Waits for moves, gives the disk's folder back and leaves the store. Repeatable."""
        for part in (self.spill, self.disk, self.mooncake):
            if part is not None:
                part.close()


def default_disk_bytes(folder: Path) -> int:
    """A quarter of what is free on the file system that has the folder, or will have it.

    What snapshots in the folder take counts as free: otherwise each start would have a smaller
    limit than the one before, which filled it. It is 0 if there is no such file system.
    """
    for place in (folder, folder.parent):
        with suppress(OSError):
            return (shutil.disk_usage(place).free + _used_bytes(folder)) // 4
    return 0


def _used_bytes(folder: Path) -> int:
    """The bytes of snapshots' files in a folder and in the folders in it."""
    used_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if FILE_FORM.fullmatch(name) or ASIDE_FORM.fullmatch(name):
                with suppress(OSError):  # it has vanished
                    used_bytes += Path(place, name).lstat().st_size
    return used_bytes
