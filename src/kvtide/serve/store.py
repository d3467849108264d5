"""Store: the host memory of an engine, and the disk below it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, final

from kvtide.arena import HostArena
from kvtide.arena.budget import default_host_bytes, untouched_bytes_of
from kvtide.pool import Pool
from kvtide.serve.options import EngineOptions
from kvtide.tier import DiskStats, DiskTier, Spill, SpillStats
from kvtide.transfer import chunk_bytes_for


class DiskCounts(TypedDict):
    """The fields of EngineStats that are the disk's."""

    disk_limit_bytes: int
    disk_bytes: int
    peak_disk_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    disk_seconds: float


@final
class Store:
    """Where an engine's requests have their KV while they have no pages."""

    def __init__(self, arena: HostArena, disk: DiskTier | None) -> None:
        self.arena = arena
        self.disk = disk
        self.spill = None if disk is None else Spill(arena, [disk])

    @classmethod
    def open(cls, pool: Pool, options: EngineOptions) -> Store:
        """Makes the arena, and opens the disk's folder if there is one.

        Raises UsageError for a folder that can't be used, such as one of another process.
        """
        limit_bytes = options.host_memory_bytes
        if limit_bytes is None:
            limit_bytes = default_host_bytes(untouched_bytes_of(pool.buffers))
        block_bytes = chunk_bytes_for(pool, limit_bytes)
        arena = HostArena(pool.device, limit_bytes=limit_bytes, block_bytes=block_bytes)
        return cls(arena, _open_disk(options))

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


def _open_disk(options: EngineOptions) -> DiskTier | None:
    folder, limit_bytes = options.disk_dir, options.disk_memory_bytes
    if folder is None:
        return None
    if limit_bytes is None:
        limit_bytes = _free_bytes_of(folder) // 4
    return DiskTier(folder, limit_bytes=limit_bytes)


def _free_bytes_of(folder: Path) -> int:
    """What is free where the folder is or will be; 0 if it can't be there."""
    for place in (folder, folder.parent):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
