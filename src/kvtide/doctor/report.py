"""The contracts of a doctor's report and of the page to which it writes.

A report examines something once. It writes each line as soon as it knows it, so that after a crash
of a driver the last line tells the check. Afterwards it gives all findings as one object for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.doctor.finding import Finding


class Page(Protocol):
    """Where lines are written: a terminal, a file, or nowhere."""

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Writes names with their values."""

    def heading(self, text: str) -> None:
        """Writes the subject of the lines that follow."""

    def finding(self, finding: Finding, *, name: str | None = None, good: str = "ok") -> None:
        """Writes a check, by its name or `name`: `good`, or the reason and the consequence."""

    def value(self, name: str, text: str, *, is_doubtful: bool = False) -> None:
        """Writes a name and a value that is neither good nor bad."""

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Writes a table. The first and the last column hold text, the others figures."""

    def repeat_failed(self, heading: str, findings: Sequence[Finding]) -> None:
        """Writes the failed checks again, if a person may have lost sight of them."""

    def verdict(self, what: str, findings: Sequence[Finding], *, good: str = "ok") -> None:
        """Writes the last line: `what` is `good`, or how many checks failed."""


class Report(Protocol):
    """The findings of a doctor."""

    @property
    def findings(self) -> list[Finding]:
        """The findings of all checks so far."""
        ...

    def examine(self, page: Page) -> None:
        """Runs all checks once and writes the findings to `page`."""

    def to_json(self) -> dict[str, object]:
        """The report as one object, after `examine`."""
        ...
