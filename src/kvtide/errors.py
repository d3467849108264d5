"""Everything kvtide raises on purpose.

KvtideError
├── UsageError         what a person asked for can't be: printed as one line, exit code 2
├── LayoutError        a declaration that contradicts itself, or buffers that don't fit one
├── SlotError          slots or pages that can't be meant: negative, repeated, not held
├── ArenaFull          the host budget has no room: this one request degrades
├── SnapshotMiss       nothing to restore: discarded, or of another geometry, length or key
├── SnapshotDamaged    the bytes aren't those that were sealed
├── SlotsLost          a restore broke off while it wrote: neither the old bytes nor the new
└── ProcessForked      a move, or a device, that the process left behind when it forked

A restore that doesn't raise is a hit. Outcomes are exceptions and not values, because a
value that nobody looks at is a silent miss.
"""

from __future__ import annotations

import copy
import traceback
from contextlib import suppress
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


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


class SlotsLost(KvtideError):
    """A restore failed in the middle of its writes: its slots may hold neither the old bytes nor
    the new, so nothing may read them. Release them; the snapshot is whole, and can be restored
    again. The cause is what failed."""


class ProcessForked(KvtideError):
    """What this move, or device, needs was left behind in the process that this one was forked
    from."""


def first_line(error: BaseException) -> str:
    """The error's class, and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(text: str, most: int = 40) -> str:
    """A text of any length as an error quotes it: `most` characters at most."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def to_keep(error: E) -> E:
    """The error without its traceback, which holds the frames that it came through and those that
    called them, with all that they hold. Of what isn't kvtide's own a note says where it was."""
    is_noted = isinstance(error, KvtideError) or hasattr(error, "__notes__")
    if not is_noted and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    kept: BaseException | None = error
    while kept is not None and kept.__traceback__ is not None:
        kept.__traceback__ = kept.__context__ = None
        kept = kept.__cause__
    return error


def to_raise(error: E) -> E:
    """The error anew, for each who asks: what is raised holds the frames of who asked."""
    for copied in (copy.copy, _made_bare):
        with suppress(Exception):  # of a class that is made in a way of its own
            again = copied(error)
            again.__cause__ = error.__cause__
            return again
    return error


def _made_bare(error: E) -> E:
    """A copy without a call of `__init__`, which may want other arguments than the error keeps."""
    again = type(error).__new__(type(error), *error.args)
    vars(again).update(vars(error))
    return again
