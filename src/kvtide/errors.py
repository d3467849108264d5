"""Everything kvtide raises on purpose.

KvtideError
├── UsageError         what a person asked for can't be: printed as one line, exit code 2
├── LayoutError        a declaration that contradicts itself, or buffers that don't fit one
├── SlotError          slots or pages that can't be meant: negative, repeated, not held
├── ArenaFull          the host budget has no room: this one request degrades
├── SnapshotMiss       nothing to restore: discarded, or of another geometry, length or key
└── SnapshotDamaged    the bytes aren't those that were sealed

A restore that doesn't raise is a hit. Outcomes are exceptions and not values, because a
value that nobody looks at is a silent miss.
"""

from __future__ import annotations


class KvtideError(Exception):
    """The root of the tree: catch this to catch all that kvtide raises on purpose."""


class UsageError(KvtideError):
    """A person's request can't be carried out; the message names the value and the remedy."""


class LayoutError(KvtideError, ValueError):
    """A layout, its sizes or the buffers given for it contradict each other."""


class SlotError(KvtideError, ValueError):
    """Slot or page ids that can't be meant; the message names the first bad id."""


class ArenaFull(KvtideError):
    """The arena's limit leaves no room for this lease; nothing was taken. Worth a retry later."""


class SnapshotMiss(KvtideError):
    """There is nothing to restore under this snapshot; the target is unchanged."""


class SnapshotDamaged(KvtideError):
    """A chunk's checksum differs from its seal; the target is unchanged."""


def first_line(error: BaseException) -> str:
    """The error's class, and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
