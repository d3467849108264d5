"""A stream to show progress on, which may go away while the run goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, TextIO, cast

from rich.console import Console


def make_console() -> Console:
    """A console on standard error as it is now, if there is one."""
    if sys.stderr is None:
        return Console(stderr=True)
    return Console(file=cast(IO[str], SturdyStream(sys.stderr)))


class SturdyStream:
    """Passes on to a stream until that fails: its terminal was closed, or its reader is gone.

    From then on what is written goes nowhere. No answer is given up for want of a display.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See TextIO."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """See TextIO."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        # What the stream still holds, and what others write there, must not fail either.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
