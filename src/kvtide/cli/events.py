"""`--log-format json`: each line on standard error is one JSON object with an event's name."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from kvtide.cli.display import Display, Event, printable


def event_line(event: Event, message: str | None = None, **facts: Any) -> str:
    """One line of JSON, in ASCII: `event`, then the line for people as `message`, then facts."""
    said = {} if message is None else {"message": message}
    return json.dumps({"event": event, **said, **facts})


class EventDisplay(Display):
    """Writes each event as an object; a quiet one writes the loud ones alone.

    Inside its context a line that somebody else writes to `sys.stderr`, such as a library's
    warning, becomes an event too.
    """

    _kept: TextIO | None = None

    def __enter__(self) -> EventDisplay:
        self._kept = sys.stderr
        if self._kept is not None:  # it is None where standard error is closed
            sys.stderr = ForeignLines(self._kept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(sys.stderr, ForeignLines):
            sys.stderr.end()
        if self._kept is not None:
            sys.stderr = self._kept

    def say(self, line: str, *, event: Event = "note", cut: bool = False, **facts: Any) -> None:
        """See Display. The line is never cut."""
        del cut
        if self._is_shown(event):
            self._write(event_line(event, line, **facts))

    def conclude(self, rows: Sequence[tuple[str, str]], report: Mapping[str, Any]) -> None:
        """See Display. Writes the report."""
        del rows
        if self._is_shown("report"):
            self._write(event_line("report", **report))

    def _write(self, line: str) -> None:
        file = self._console.file
        file.write(f"{line}\n")
        file.flush()


class ForeignLines(io.TextIOBase):
    """A file that makes each line an event named `stderr`, and writes it to another file."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.rich_proxied_file = file
        """By this name a rich console finds the file behind this one, for events themselves."""
        self._begun = ""

    def write(self, text: str) -> int:
        """Writes the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._tell(line)
        return len(text)

    def end(self) -> None:
        """Writes the last line, if it has no end."""
        self._tell(self._begun)
        self._begun = ""

    def _tell(self, line: str) -> None:
        if line.strip():
            self.rich_proxied_file.write(f"{event_line('stderr', printable(line.rstrip()))}\n")
            self.rich_proxied_file.flush()
