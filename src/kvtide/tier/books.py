"""Books: which files a disk tier has, in the order of leaving, and how many bytes they take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
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

    With `keeps_used`, a file that was written or read since then doesn't leave for others, unless
    its user says so: it is counted as if it were being read until it loses its name.
    """

    def __init__(
        self, folder: Folder, limit_bytes: int, keeps_used: bool = False, used: Iterable[str] = ()
    ) -> None:
        """Finds what the folder has, and removes what exceeds the limit. Raises OSError.

        `used` are names of files that were used before.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        # A plain dictionary would search for its first item behind all those that have left.
        self._files = OrderedDict(_by_age(list(folder.entries())))
        self._aside = OrderedDict(_by_age(list(folder.entries_aside())))
        self._readings: dict[str, Reading] = {}
        self._keeps_used = keeps_used
        self.used: set[str] = set()
        """The files that don't leave for others."""
        self._stuck: set[str] = set()
        """Damaged files that can't be moved aside. They aren't read, and leave like others."""
        self.used_bytes = sum(self._files.values()) + sum(self._aside.values())
        self._busy_bytes = 0
        """Bytes that can't leave now: they are being written or read."""
        self.evicted = 0
        self._make_room(0)
        self.peak_bytes = self.used_bytes
        for name in used:
            self._note_use(name)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files and name not in self._stuck

    def names(self) -> list[str]:
        """The names of all files that can be read."""
        return [name for name in self._files if name not in self._stuck]

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

    def keep(self, name: str, reserved: Reserved, *, may_leave: bool = False) -> None:
        """The file has its name now, in place of what had it."""
        self.drop(name)
        self._files[name] = reserved.size_bytes
        self._busy_bytes -= reserved.size_bytes
        reserved.size_bytes = 0
        if not may_leave:
            self._note_use(name)

    def drop(self, name: str) -> None:
        """The file has lost its name. While it is being read its bytes count."""
        size_bytes = self._files.pop(name, None)
        self._stuck.discard(name)
        reading = self._readings.pop(name, None)
        if reading is not None:
            reading.is_gone = True
            self._forget_use(name, reading)
        elif size_bytes is not None:
            self.used_bytes -= size_bytes

    def begin(self, name: str, *, may_leave: bool = False) -> Reading | None:
        """Begins to read a file, which is the one used last from now on; None if there is none."""
        if name not in self:
            return None
        self._files.move_to_end(name)
        if not may_leave:
            self._note_use(name)
        return self._reading(name)

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
            self._forget_use(name, self._readings[name])
        else:
            self._aside[target] = self._files.pop(name)
            self._forget_use(name, self._readings.pop(name))

    def free(self, size_bytes: int) -> bool:
        """Lets files of that many bytes leave, since the disk is full before the limit is reached.

        Whether any left. Raises OSError.
        """
        aim, before = max(0, self.used_bytes - size_bytes), self.used_bytes
        while self.used_bytes > aim and self._remove_one():
            pass
        return self.used_bytes < before

    def _reading(self, name: str) -> Reading:
        reading = self._readings.get(name)
        if reading is None:
            reading = self._readings[name] = Reading(self._files[name])
            self._busy_bytes += reading.size_bytes
        reading.count += 1
        return reading

    def _note_use(self, name: str) -> None:
        if self._keeps_used and name in self and name not in self.used:
            self._reading(name)
            self.used.add(name)

    def _forget_use(self, name: str, reading: Reading) -> None:
        if name in self.used:
            self.used.remove(name)
            self.end(name, reading)

    def clear(self) -> None:
        """Removes all files but for those that are being read. Raises OSError."""
        for target in tuple(self._aside):
            self._folder.remove_aside(target)
            self.used_bytes -= self._aside.pop(target)
        for name in [name for name in self._files if name not in self._readings]:
            self._folder.remove(name)
            self.drop(name)

    def _make_room(self, size_bytes: int) -> None:
        while self.used_bytes + size_bytes > self._limit_bytes:
            assert self._remove_one(), "what can't leave is within the limit"

    def _remove_one(self) -> bool:
        """Removes a damaged file, or the least recently used; False if none can leave."""
        name = next(iter(self._aside), None)
        if name is not None:
            self._folder.remove_aside(name)
            self.used_bytes -= self._aside.pop(name)
            return True
        name = next((name for name in self._files if name not in self._readings), None)
        if name is None:
            return False
        self._folder.remove(name)
        self.drop(name)
        self.evicted += 1
        return True


def _by_age(entries: list[FileEntry]) -> Iterator[tuple[str, int]]:
    """Names and sizes of files in whole pages, the one that was used least recently first."""
    if not entries:
        return iter(())
    used_at, names, sizes = zip(*entries, strict=True)
    order = np.argsort(np.array(used_at), kind="stable")
    whole = -(-np.array(sizes, np.int64)[order] // ALIGNMENT) * ALIGNMENT
    return zip(map(names.__getitem__, order.tolist()), whole.tolist(), strict=True)
