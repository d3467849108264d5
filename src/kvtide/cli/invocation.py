"""Invocation: what one call of the command line shares among its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.cli.serving import LibraryServing, Serving


@dataclass
class Invocation:
    """One call of `kvtide`; typer hands it to the commands as their context's `obj`."""

    serving: Serving = field(default_factory=LibraryServing)
    as_json: bool = False
    """Whether each line on standard error is a JSON object, `main`'s errors included."""
