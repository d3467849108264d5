"""open_store: opens what is below a rank's arena: a disk, a Mooncake store, or both."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtide.arena import HostArena
from kvtide.errors import UsageError
from kvtide.plugin.environment import Below
from kvtide.tier import DiskTier, Store
from kvtide.tier.folder import first_free
from kvtide.tier.mooncake_connect import check_mooncake
from kvtide.tier.names import LOCK
from kvtide.tier.store import default_disk_bytes

logger = logging.getLogger(__name__)

_MOST_FOLDERS = 256
_PREFIX = "retracted-"
"""What else is in the operator's folder, such as the folder of `kvtide run`, isn't touched."""


def open_store(arena: HostArena, below: Below, rank_count: int) -> Store:
    """A rank's arena with the tiers below it. A warning names a tier that can't be used.

    Each of the `rank_count` ranks gets an empty folder of its own on the disk, and an equal part of
    the disk's limit. Each joins the Mooncake store by itself.
    """
    ways = (below, replace(below, disk_dir=None), replace(below, mooncake=None))
    for way in dict.fromkeys(ways):
        try:
            if way.mooncake is not None:
                check_mooncake(way.mooncake)
            if way.disk_dir is not None:
                return _with_disk(arena, way, way.disk_dir, rank_count)
            return Store(arena, mooncake=way.mooncake, deadline_s=way.wait_s)
        except (UsageError, OSError) as error:
            logger.warning("kvtide goes on without a tier: %s", error)
    return Store(arena)


def _with_disk(arena: HostArena, below: Below, disk_dir: Path, rank_count: int) -> Store:
    """Raises UsageError if a tier can't be used, OSError."""
    disk_dir.mkdir(mode=0o700, exist_ok=True)
    _clear(disk_dir)
    together = below.disk_bytes
    if together is None:
        together = default_disk_bytes(disk_dir)
    folders = (disk_dir / f"{_PREFIX}{number}" for number in range(_MOST_FOLDERS))
    store = first_free(
        (folder for folder in folders if not folder.exists() or _is_ours(folder)),
        lambda folder: Store(
            arena,
            folder,
            together // rank_count,
            mooncake=below.mooncake,
            deadline_s=below.wait_s,
        ),
    )
    if store is None:
        raise UsageError(
            f"none of {_MOST_FOLDERS} folders {_PREFIX}… in {disk_dir} is free; give each server a "
            "folder of its own"
        )
    return store


def _clear(disk_dir: Path) -> None:
    """Removes the files of ranks that have ended. Nobody can use them, and they take room."""
    for folder in disk_dir.glob(f"{_PREFIX}*"):
        if folder.name.removeprefix(_PREFIX).isdecimal() and _is_ours(folder):
            with suppress(UsageError):  # a running server has it, or the disk refuses it
                DiskTier(folder, limit_bytes=0).close()


def _is_ours(folder: Path) -> bool:
    """Whether a rank made the folder: it isn't a link, and has the lock of a tier."""
    return not folder.is_symlink() and (folder / LOCK).is_file()
