"""The contract of a doctor's report, and of the page that it is written on.

A report examines something once, and writes each line to a page as soon as it is known: where a
driver crashes, the last line says at what. Then it is there as one object, for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.doctor.finding import Finding


class Page(Protocol):
    """Where lines are written: a terminal, a file, or nowhere."""

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Names, and beside each what it has."""

    def heading(self, text: str) -> None:
        """What the lines that follow are about."""

    def finding(self, finding: Finding, *, name: str | None = None, good: str = "ok") -> None:
        """A check under its name, or another `name`: `good`, or what is wrong and what follows."""

    def value(self, name: str, text: str, *, is_doubtful: bool = False) -> None:
        """A name and what was found of it, where that is neither good nor bad."""

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column and the last hold words, those between hold figures."""

    def repeat_failed(self, heading: str, findings: Sequence[Finding]) -> None:
        """What failed, once more, where a person may have lost sight of it."""

    def verdict(self, what: str, findings: Sequence[Finding]) -> None:
        """The last line: `what` is sound, or how many of the checks failed."""


class Report(Protocol):
    """What a doctor finds."""

    @property
    def findings(self) -> list[Finding]:
        """One for each check so far."""
        ...

    def examine(self, page: Page) -> None:
        """Tries everything, once; writes what it finds to `page`."""

    def to_json(self) -> dict[str, object]:
        """All of it as one object, after `examine`."""
        ...
