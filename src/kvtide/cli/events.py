"""`--log-format json`: each line on standard error is one JSON object with an event's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.cli.display import Display


def event_line(event: str, message: str | None = None, **facts: Any) -> str:
    """One line of JSON, in ASCII: `event`, then the line for people as `message`, then facts."""
    said = {} if message is None else {"message": message}
    return json.dumps({"event": event, **said, **facts})


class EventDisplay(Display):
    """Writes each event as an object; a quiet one writes the loud ones alone."""

    def say(self, line: str, *, event: str = "note", cut: bool = False, **facts: Any) -> None:
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
