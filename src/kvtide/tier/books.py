"""Books: which files a disk tier has, in the order of leaving, and how many bytes they take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import final

import numpy as np

from kvtide.errors import TierFull
from kvtide.tier.file_form import ALIGNMENT
from kvtide.tier.folder import FileEntry, Folder


@final
class Reserved:
    """Bytes for a file that is being written; 0 once the file is in the books, or given up."""

    __slots__ = ("size_bytes",)

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


@final
class Reading:
    """A file that is being read by `count` calls. It may have lost its name meanwhile."""

    __slots__ = ("count", "is_gone", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.count = 0
        self.is_gone = False


@final
class Books:
    """The files of a folder, together never more than `limit_bytes`. Not thread-safe.

    Everything on the disk counts: files, those that are being written, those that lost their name
    while somebody reads them, and the damaged ones that were moved aside. `used_bytes` is never
    above the limit. Looking a name up, reading it and letting the oldest file leave take the same
    time whatever the number of files.
    """

    def __init__(self, folder: Folder, limit_bytes: int) -> None:
        """Finds what the folder has, and removes what exceeds the limit. Raises OSError."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        # A plain dictionary would search for its first item behind all those that have left.
        self._files = OrderedDict(_by_age(list(folder.entries())))
        self._aside = OrderedDict(_by_age(list(folder.entries_aside())))
        self._readings: dict[str, Reading] = {}
        self._stuck: set[str] = set()
        """Damaged files that can't be moved aside. They aren't read, and leave like others."""
        self.used_bytes = sum(self._files.values()) + sum(self._aside.values())
        self._busy_bytes = 0
        """Bytes that can't leave now: they are being written or read."""
        self.evicted = 0
        self._make_room(0)
        self.peak_bytes = self.used_bytes

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files and name not in self._stuck

    def reserve(self, reserved: Reserved) -> None:
        """Lets files leave until there is room. Raises TierFull, before any leaves, and OSError."""
        size_bytes = reserved.size_bytes
        reserved.size_bytes = 0
        if size_bytes > self._limit_bytes - self._busy_bytes:
            raise TierFull(
                f"disk tier: {size_bytes} bytes asked for, {self._busy_bytes} of "
                f"{self._limit_bytes} in use by other calls; raise the limit, or recompute this "
                "request"
            )
        self._make_room(size_bytes)
        reserved.size_bytes = size_bytes
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._busy_bytes += size_bytes

    def give_up(self, reserved: Reserved) -> None:
        """The bytes aren't used any more. Repeatable, and nothing after `keep`."""
        self.used_bytes -= reserved.size_bytes
        self._busy_bytes -= reserved.size_bytes
        reserved.size_bytes = 0

    def keep(self, name: str, reserved: Reserved) -> None:
        """The file has its name now, in place of what had it."""
        self.drop(name)
        self._files[name] = reserved.size_bytes
        self._busy_bytes -= reserved.size_bytes
        reserved.size_bytes = 0

    def drop(self, name: str) -> None:
        """The file has lost its name. While it is being read its bytes count."""
        size_bytes = self._files.pop(name, None)
        self._stuck.discard(name)
        reading = self._readings.pop(name, None)
        if reading is not None:
            reading.is_gone = True
        elif size_bytes is not None:
            self.used_bytes -= size_bytes

    def begin(self, name: str) -> Reading | None:
        """Begins to read a file, which is the one used last from now on; None if there is none."""
        if name not in self:
            return None
        self._files.move_to_end(name)
        reading = self._readings.get(name)
        if reading is None:
            reading = self._readings[name] = Reading(self._files[name])
            self._busy_bytes += reading.size_bytes
        reading.count += 1
        return reading

    def end(self, name: str, reading: Reading) -> None:
        """A call that began to read has ended."""
        reading.count -= 1
        if reading.count:
            return
        self._busy_bytes -= reading.size_bytes
        if self.is_current(name, reading):
            del self._readings[name]
        elif reading.is_gone:
            self.used_bytes -= reading.size_bytes

    def is_current(self, name: str, reading: Reading) -> bool:
        """Whether the file that is being read still has its name."""
        return self._readings.get(name) is reading

    def move_aside(self, name: str) -> None:
        """Moves a damaged file out of the way of later reads. Where the disk refuses it is noted.

        The file must be one that is being read.
        """
        try:
            target = self._folder.move_aside(name)
        except FileNotFoundError:
            self.drop(name)
        except OSError:
            self._stuck.add(name)
        else:
            self._aside[target] = self._files.pop(name)
            del self._readings[name]

    def _make_room(self, size_bytes: int) -> None:
        """Removes the damaged files, then the least recently used, until there is room."""
        while self.used_bytes + size_bytes > self._limit_bytes:
            if self._aside:
                name = next(iter(self._aside))
                self._folder.remove_aside(name)
                self.used_bytes -= self._aside.pop(name)
            else:
                name = next(name for name in self._files if name not in self._readings)
                self._folder.remove(name)
                self.drop(name)
                self.evicted += 1


def _by_age(entries: list[FileEntry]) -> Iterator[tuple[str, int]]:
    """Names and sizes of files in whole pages, the one that was used least recently first."""
    order = np.argsort(np.array([used_at for used_at, _, _ in entries]), kind="stable").tolist()
    sizes = np.array([size_bytes for _, _, size_bytes in entries], np.int64)
    whole = (-(-sizes // ALIGNMENT) * ALIGNMENT).tolist()
    return ((entries[place][1], whole[place]) for place in order)
