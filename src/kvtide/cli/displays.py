"""Chooses how progress is shown."""

from __future__ import annotations

from rich.console import Console

from kvtide.cli.display import Display
from kvtide.cli.events import EventDisplay
from kvtide.cli.live import LiveDisplay


def make_display(console: Console, *, quiet: bool = False, as_json: bool = False) -> Display:
    """A live display for a terminal that can move its cursor, otherwise plain lines or events."""
    if as_json:
        return EventDisplay(console, quiet=quiet)
    if console.is_terminal and not console.is_dumb_terminal and not quiet:
        return LiveDisplay(console)
    return Display(console, quiet=quiet)
