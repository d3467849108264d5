"""Everything kvtide raises on purpose.

KvtideError
├── UsageError         a person asked for something impossible: one line, exit code 2
├── LayoutError        a declaration that contradicts itself, or buffers that don't fit one
├── SlotError          invalid slots or pages: negative, repeated, not held
├── ArenaFull          the host memory's limit leaves no room: only this request suffers
├── SnapshotMiss       nothing to restore: discarded, or another geometry, length or key
├── SnapshotDamaged    the snapshot's bytes differ from its seal
├── TierFull           a store below host memory has no room: the snapshot stays where it is
├── TierRetry          a store below host memory can't answer now; a later try may work
├── SlotsLost          a restore failed while it wrote: the slots hold neither old nor new bytes
└── ProcessForked      a move or a device belongs to the process before the fork

A restore that raises nothing has restored everything. A failure is an exception and not a return
value, because a caller can overlook a value.
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
    """Invalid slot or page ids; the message names the first bad id."""


class ArenaFull(KvtideError):
    """The arena's limit leaves no room for this lease. Nothing was taken; a later try may work."""


class SnapshotMiss(KvtideError):
    """There is nothing to restore under this snapshot; the target is unchanged."""


class SnapshotDamaged(KvtideError):
    """A chunk's checksum differs from its seal; the target is unchanged."""


class TierFull(KvtideError):
    """A tier's limit leaves no room for this snapshot, even if others leave. Nothing was kept."""


class TierRetry(KvtideError):
    """A tier can't answer now, for example because its disk is full or its server is away."""


class SlotsLost(KvtideError):
    """A restore failed while it wrote, so its slots may hold neither the old bytes nor the new.

    Read nothing from the slots and release them. The snapshot is whole and can be restored again.
    `__cause__` is the error that ended the restore.
    """


class ProcessForked(KvtideError):
    """The move or the device belongs to the process that this process was forked from."""


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(text: str, most: int = 40) -> str:
    """A text of any length as an error quotes it: `most` characters at most."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def to_keep(error: E) -> E:
    """Removes the traceback, which keeps frames and all their values alive; returns the error.

    An error of another library gets the traceback's text as a note.
    """
    is_noted = isinstance(error, KvtideError) or hasattr(error, "__notes__")
    if not is_noted and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    kept: BaseException | None = error
    while kept is not None and kept.__traceback__ is not None:
        kept.__traceback__ = kept.__context__ = None
        kept = kept.__cause__
    return error


def to_raise(error: E) -> E:
    """A copy of the error, so that each raise has its own traceback.

    Returns the error itself if its class can't be copied.
    """
    for make_copy in (copy.copy, _copy_without_init):
        with suppress(Exception):  # some classes can't be copied, each in its own manner
            copied = make_copy(error)
            copied.__cause__ = error.__cause__
            return copied
    return error


def _copy_without_init(error: E) -> E:
    """A copy for classes whose `__init__` takes other arguments than `args` has."""
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied
