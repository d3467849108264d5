"""How findings look: aligned on a terminal, a line each anywhere else, an object each in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvtide.cli.display import counted, printable

if TYPE_CHECKING:
    from kvtide.cli.checkup.finding import Finding

_NAME_WIDTH = 68


def print_heading(console: Console, text: str) -> None:
    """A bold line, after an empty one."""
    console.print(Text(f"\n{text}", "bold"), soft_wrap=not console.is_terminal)


def print_finding(
    console: Console, finding: Finding, *, name: str | None = None, good: str = "ok"
) -> None:
    """A line; on a terminal what is wrong stands below it, as it may be long."""
    name = printable(name or finding.name, console.encoding)
    if finding.ok:
        print_value(console, name, Text(good, "green"))
        return
    follows = f"; so {finding.consequence}" if finding.consequence else ""
    wrong = Text(printable(f"{finding.reason}{follows}", console.encoding))
    if console.is_terminal:
        print_value(console, name, Text("FAILED", "bold red"))
        console.print(Padding(wrong, (0, 0, 0, 4)))
    else:
        print_value(console, name, Text.assemble("FAILED: ", wrong))


def print_value(console: Console, name: str, value: Text) -> None:
    """A name and what it has."""
    if console.is_terminal:
        console.print(Text.assemble(f"{name:<{_NAME_WIDTH}}  ", value))
    else:
        console.print(Text.assemble(f"{name}: ", value), soft_wrap=True)


def print_verdict(console: Console, what: str, findings: Sequence[Finding]) -> None:
    """The last line: `what: ok`, or how many of the checks failed."""
    failed, checks = count_failed(findings), counted(len(findings), "check")
    verdict = f"{failed:,} of {checks} failed" if failed else "ok"
    line = printable(f"{what}: {verdict}", console.encoding)
    style = "bold red" if failed else "bold green"
    console.print(Text(f"\n{line}", style), soft_wrap=not console.is_terminal)


def count_failed(findings: Sequence[Finding]) -> int:
    """How many of them aren't as they should be."""
    return sum(not finding.ok for finding in findings)


def finding_to_json(finding: Finding) -> dict[str, object]:
    """All of a finding."""
    return {
        "name": finding.name,
        "ok": finding.ok,
        "reason": finding.reason,
        "consequence": finding.consequence or None,
    }
