"""A disk tier over real files, whose system calls fail as often as a simulation says."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvtide.tier import DiskTier
from tier.faulty_tiers import Clock

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)
_CALLS = ("open", "rename", "unlink", "mkdir", "utime", "fstat", "pwritev", "preadv")


class FaultyDisk:
    """A DiskTier, and what goes wrong below it: in system calls, and with what lies on the disk."""

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        clock: Clock,
        limit_bytes: int,
        fault_share: float,
        *,
        keeps_used: bool = True,
    ) -> None:
        self._chance = chance
        self._clock = clock
        self.fault_share = 0.0
        self.tier = DiskTier(folder, limit_bytes=limit_bytes, keeps_used=keeps_used)
        self._folder = folder
        self.fault_share = fault_share
        self.limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """What the tier says, which is what its files take."""
        return self.tier.stats.used_bytes

    def check(self) -> None:
        """All files together, drafts and damaged ones included, take no more than the limit."""
        found = [path.lstat() for path in self._folder.glob("*/*")]
        files = [about.st_size for about in found if stat.S_ISREG(about.st_mode)]
        assert sum(files) <= self.limit_bytes
        assert self.used_bytes <= self.limit_bytes

    def left(self) -> list[str]:
        """Files that are left, but for the damaged ones, which were moved aside."""
        found = self._folder.glob("[0-9a-f][0-9a-f]/*")
        return [path.name for path in found if not path.is_symlink()]

    def close(self) -> None:
        """Ends the tier."""
        self.tier.close()

    def harm(self) -> None:
        """Flips a bit of a file, cuts it, removes it, or gives it another file's name."""
        share, self.fault_share = self.fault_share, 0.0
        self._harm()
        self.fault_share = share

    def _harm(self) -> None:
        files = sorted(self._folder.glob("??/*.safetensors"))
        if not files:
            return
        path = self._chance.choice(files)
        act = self._chance.choice(("flip", "cut", "lose", "swap", "link"))
        if act == "lose":
            path.unlink()
        elif act == "link":
            path.unlink()
            path.symlink_to("/etc/hostname")
        elif act == "swap":
            other = self._chance.choice(files)
            if other.lstat().st_size == path.lstat().st_size:
                for old, new in ((path, "aside"), (other, path), ("aside", other)):
                    with suppress(FileNotFoundError):  # where it is the same file
                        (self._folder / old).rename(self._folder / new)
        elif path.is_file() and not path.is_symlink():
            with path.open("r+b") as file:
                size_bytes = path.stat().st_size
                place = self._chance.randrange(max(1, size_bytes))
                if act == "cut":
                    file.truncate(place)
                elif size_bytes:
                    file.seek(place)
                    value = file.read(1)[0]
                    file.seek(place)
                    file.write(bytes([value ^ 1 << self._chance.randrange(8)]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the system's calls fail as often as `fault_share` says, and nothing is synced."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._faulty(name, getattr(os, name)))
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, self._faulty(name, lambda descriptor: None))
            yield

    def _faulty(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **more: Any) -> Any:
            if self._chance.random() >= self.fault_share:
                return whole(*values, **more)
            self._clock.now += self._chance.choice((0.0, 0.0, 3.0))
            if name in ("pwritev", "preadv") and self._chance.random() < 0.6:
                return self._short(name, whole, values)
            number = self._chance.choice(_ERRORS)
            raise OSError(number, os.strerror(number))

        return call

    def _short(self, name: str, whole: Callable[..., Any], values: tuple[Any, ...]) -> int:
        """Moves a part only: and says so, or says that it wrote all, as a disk that lost power."""
        file, parts, place = values
        size_bytes = self._chance.randrange(1, max(2, parts[0].nbytes))
        count = int(whole(file, [parts[0][:size_bytes]], place))
        if name == "pwritev" and self._chance.random() < 0.5:
            total = sum(part.nbytes for part in parts)
            os.ftruncate(file, place + total)
            return int(total)
        return count
