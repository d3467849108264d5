"""open_below: opens what an operator set below a rank's host memory: a disk, a Mooncake store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from kvtide.errors import UsageError
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.plugin.vllm.stack import TierStack
from kvtide.sizes import format_size
from kvtide.tier import DiskTier, MooncakeTier, Tier
from kvtide.tier.folder import first_free
from kvtide.tier.store import default_disk_bytes

_MOST_FOLDERS = 256
_BLOCKS_OF_A_STORE = 1 << 18
"""How many blocks of a store a scheduler remembers: nobody tells how many there are."""


@final
@dataclass(slots=True)
class TiersBelow:
    """The tiers of a rank."""

    disk: DiskTier | None = None
    mooncake: MooncakeTier | None = None
    master: str = ""
    """Who knows what lies where in the Mooncake store."""

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that there are, the nearest first."""
        return [tier for tier in (self.disk, self.mooncake) if tier is not None]

    @property
    def tier(self) -> Tier | None:
        """All tiers as one; None if there is none."""
        return self.disk if self.mooncake is None else TierStack(self.tiers)

    @property
    def names(self) -> frozenset[str]:
        """The names of the blocks that earlier processes left on the disk."""
        return frozenset() if self.disk is None else self.disk.names

    def block_count(self, block_bytes: int) -> int:
        """About how many blocks of that size there may be below; at least one byte each."""
        on_disk = 0 if self.disk is None else self.disk.stats.limit_bytes // block_bytes
        return on_disk if self.mooncake is None else max(on_disk, _BLOCKS_OF_A_STORE)

    def close(self) -> None:
        """Gives the folder back, and leaves the store. Repeatable."""
        for tier in (self.disk, self.mooncake):
            if tier is not None:
                tier.close()

    def __str__(self) -> str:
        """What a log says of it."""
        named = []
        if self.disk is not None:
            stats = self.disk.stats
            named.append(
                f"a disk below it up to {format_size(stats.limit_bytes)}, with {stats.snapshots} "
                "blocks from before"
            )
        if self.mooncake is not None:
            named.append(f"the Mooncake store of {self.master} below it")
        return ", and ".join(named) or "no disk below it"


def open_below(settings: OffloadSettings, rank: int, rank_count: int) -> TiersBelow:
    """Opens a rank's tiers. Raises UsageError if one can't be used; then none stays open."""
    below = TiersBelow()
    try:
        below.disk = open_disk(settings, rank, rank_count)
        if settings.mooncake is not None:
            below.mooncake = MooncakeTier(settings.mooncake)
            below.master = settings.mooncake.master
    except BaseException:
        below.close()
        raise
    return below


def open_disk(settings: OffloadSettings, rank: int, rank_count: int) -> DiskTier | None:
    """This rank's folder on the disk, if there is a disk. Raises UsageError if it can't be used."""
    if settings.disk_dir is None:
        return None
    folder, together = settings.disk_dir / "vllm", settings.disk_memory_bytes
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if together is None:
            together = default_disk_bytes(folder)
    except OSError as error:
        raise UsageError(f"disk_dir: {folder}: {error.strerror}") from error
    open_in = partial(DiskTier, limit_bytes=together // rank_count)
    disk = first_free(_folders(folder, rank, rank_count), open_in)
    if disk is None:
        raise UsageError(
            f"disk_dir: all {_MOST_FOLDERS} folders of rank {rank} in {folder} are in use"
        )
    return disk


def _folders(folder: Path, rank: int, rank_count: int) -> list[Path]:
    """The folders that a rank may use; a second engine on the same disk takes the second."""
    return [folder / f"{rank}-of-{rank_count}-{number}" for number in range(_MOST_FOLDERS)]
