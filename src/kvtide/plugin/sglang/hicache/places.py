"""Places: the tiers in which a rank keeps pages, and those in which it finds other ranks' pages.

    D/hicache/tp0of2-pp0of1-cp0of1.0/    a folder with one writer, as DiskTier has it

Where all ranks have the same KV (latents), SGLang lets one rank write. The others read its folder
without a lock: a file there is whole or not at all, and each byte of it is checked. Servers with
the same folder D get folders of their own, by the last number, and read each other's in this way.

A tenant has its own folder in D, `hicache-` and a hash of its secret: whoever clears or fills the
one in use doesn't touch another tenant's pages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import final

from kvtide.errors import SnapshotDamaged, SnapshotMiss, TierFull, TierRetry, UsageError
from kvtide.plugin.sglang.hicache.settings import OPTION, StorageSettings
from kvtide.seal import Seal
from kvtide.sizes import format_size
from kvtide.snapshot import MakeRoom
from kvtide.tier.base import Tier
from kvtide.tier.disk import DiskTier
from kvtide.tier.file_check import read_chunks, read_seal
from kvtide.tier.folder import first_free
from kvtide.tier.mooncake import MooncakeTier
from kvtide.tier.names import SUFFIX, name_of, opened_file, opened_folder, opened_root
from kvtide.tier.namespace import Namespace, salt_of
from kvtide.tier.retries import RetriedTier
from kvtide.tier.store import default_disk_bytes

FOLDER = "hicache"
_MOST_FOLDERS = 256


@final
class Places:
    """The tiers of a rank, by an operator's settings.

    Reads and writes are retried apart: a full disk takes no pages, and gives those that it has.
    """

    def __init__(self, settings: StorageSettings, shard: str, disk_share: float) -> None:
        """`shard` names the rank's part of the KV. `disk_share` is its part of the disk's limit.

        Raises UsageError if a tier can't be used.
        """
        self.disk: DiskTier | None = None
        self._mooncake: MooncakeTier | None = None
        self._root: Path | None = None
        try:
            if settings.disk_dir is not None:
                self._root = _made(settings.disk_dir)
                together = settings.disk_bytes or default_disk_bytes(self._root)
                if disk_share:
                    self.disk = _open_disk(self._root, shard, int(together * disk_share))
            if settings.mooncake is not None:
                self._mooncake = MooncakeTier(settings.mooncake)
        except BaseException:
            self.close()
            raise
        tiers = [tier for tier in (self.disk, self._mooncake) if tier is not None]
        self.to_write = [_retried(tier) for tier in tiers]
        """The tiers that take this rank's pages, the nearest first."""
        self.to_read = [_retried(tier) for tier in tiers]
        """The tiers that have this rank's pages, the nearest first."""

    def of_writer(self, shard: str) -> list[Tier]:
        """The tiers that have the pages of another shard, to read."""
        folders = [] if self._root is None else [SharedFolders(self._root, shard)]
        remote = [] if self._mooncake is None else [self._mooncake]
        return [_retried(tier) for tier in (*folders, *remote)]

    def __str__(self) -> str:
        """What a log says of it."""
        words = []
        if self.disk is not None:
            held = self.disk.stats
            room = format_size(held.limit_bytes)
            words.append(f"{held.snapshots} pages on disk, in at most {room} of {self._root}")
        elif self._root is not None:
            words.append(f"what another rank keeps in {self._root}")
        words += ["a Mooncake store"] if self._mooncake is not None else []
        return ", ".join(words)

    def clear(self) -> None:
        """Removes the pages that this rank has on its disk."""
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        """Gives the folder back and leaves the store. Repeatable."""
        for tier in (self.disk, self._mooncake):
            if tier is not None:
                tier.close()


@final
class SharedFolders(Tier):
    """The files of other processes' disk tiers, to read: the folders of a shard, whoever has them.

    A damaged file stays, since only its folder's owner may move it aside. The owner does so when it
    reads the page, as it does for each page that other ranks read.
    """

    def __init__(self, root: Path, shard: str) -> None:
        self._root = root
        self._shard = shard

    def contains(self, key: str) -> bool:
        """See Tier."""
        name = name_of(key)
        place = Path(name[:2], name + SUFFIX)
        return any((folder / place).is_file() for folder in self._folders())

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier. A page that is damaged in one folder may be whole in another."""
        failure: Exception = SnapshotMiss(f"no folder of {self._shard} has a page {key!r}")
        for folder in self._folders():
            try:
                return _read(folder, key, make_room)
            except (FileNotFoundError, SnapshotMiss):
                continue
            except SnapshotDamaged as error:
                failure = error
            except OSError as error:
                failure = TierRetry(f"{folder}: {error.strerror or error}")
        raise failure

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """Raises TierFull: these folders are other processes'."""
        raise TierFull(f"the folders of {self._shard} in {self._root} are other processes'")

    def remove(self, key: str) -> None:
        """Raises TierRetry: these folders are other processes'."""
        raise TierRetry(f"the folders of {self._shard} in {self._root} are other processes'")

    def _folders(self) -> list[Path]:
        return sorted(self._root.glob(f"{self._shard}.[0-9]*"))


def _read(folder: Path, key: str, make_room: MakeRoom) -> Seal:
    """Raises the errors of `Tier.get`, FileNotFoundError for a page that isn't there, OSError."""
    name = name_of(key)
    with (
        opened_root(folder) as root,
        opened_folder(name[:2], root) as shard,
        opened_file(name + SUFFIX, shard) as file,
    ):
        _, seal, form = read_seal(file, key)
        read_chunks(file, form, seal, make_room(seal))
        return seal


def _made(folder: Path) -> Path:
    """The folder for pages in an operator's folder; both are made. Raises UsageError."""
    root = folder / f"{FOLDER}{_tenant()}"
    try:
        for path in (folder, root):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{OPTION}: disk_dir: cannot use the folder {folder}: {error.strerror or error}"
        ) from error
    return root


def _tenant() -> str:
    """What a tenant's folder is named by; nothing without a secret."""
    salt = salt_of(os.environ)
    space = Namespace(model="", weights="", layout="", salt=salt)
    return f"-{space.key_of('').partition('/')[0]}" if salt else ""


def _open_disk(root: Path, shard: str, limit_bytes: int) -> DiskTier:
    """The tier in the first folder of a shard that nobody uses. Raises UsageError."""
    folders = (root / f"{shard}.{number}" for number in range(_MOST_FOLDERS))
    disk = first_free(folders, partial(DiskTier, limit_bytes=limit_bytes))
    if disk is None:
        raise UsageError(
            f"{OPTION}: disk_dir: all {_MOST_FOLDERS} folders {root / shard}.* are in use"
        )
    return disk


def _retried(tier: Tier) -> RetriedTier:
    return RetriedTier(tier, clock=time.monotonic, sleep=time.sleep)
