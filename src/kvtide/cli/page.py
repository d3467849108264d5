"""Prints a doctor's report: aligned on a terminal, otherwise one line for each finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvtide.cli.display import print_table, printable
from kvtide.doctor.finding import Finding, count_failed
from kvtide.sizes import counted

_NAME_WIDTH = 68


@final
class ConsolePage:
    """See doctor.report.Page."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """See Page."""
        print_table(self._console, rows)

    def heading(self, text: str) -> None:
        """Prints a bold line after an empty line."""
        self._print(Text(f"\n{text}", "bold"))

    def finding(self, finding: Finding, *, name: str | None = None, good: str = "ok") -> None:
        """Prints a line. On a terminal a failure's reason is below it, since it may be long."""
        name = self._printable(name or finding.name)
        if finding.ok:
            self._value(name, Text(good, "green"))
            return
        follows = f"; so {finding.consequence}" if finding.consequence else ""
        wrong = Text(self._printable(f"{finding.reason}{follows}"))
        if self._console.is_terminal:
            self._value(name, Text("FAILED", "bold red"))
            self._console.print(Padding(wrong, (0, 0, 0, 4)))
        else:
            self._value(name, Text.assemble("FAILED: ", wrong))

    def value(self, name: str, text: str, *, is_doubtful: bool = False) -> None:
        """See Page."""
        self._value(name, Text(text, "yellow" if is_doubtful else ""))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """See Page."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(headings[0])
        for heading in headings[1:-1]:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(headings[-1])
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def repeat_failed(self, heading: str, findings: Sequence[Finding]) -> None:
        """Only on a terminal, where a hundred lines may have scrolled away."""
        failed = [finding for finding in findings if not finding.ok]
        if failed and self._console.is_terminal:
            self.heading(heading)
            for finding in failed:
                self.finding(finding)

    def verdict(self, what: str, findings: Sequence[Finding], *, good: str = "ok") -> None:
        """Prints `what` and `good`, or how many checks failed."""
        failed, checks = count_failed(findings), counted(len(findings), "check")
        verdict = f"{failed:,} of {checks} failed" if failed else good
        line = self._printable(f"{what}: {verdict}")
        self._print(Text(f"\n{line}", "bold red" if failed else "bold green"))

    def _value(self, name: str, value: Text) -> None:
        if self._console.is_terminal:
            self._console.print(Text.assemble(f"{name:<{_NAME_WIDTH}}  ", value))
        else:
            self._console.print(Text.assemble(f"{name}: ", value), soft_wrap=True)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _printable(self, text: str) -> str:
        return printable(text, self._console.encoding)
