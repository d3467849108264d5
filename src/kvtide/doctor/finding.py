"""Finding: one thing that was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from kvtide.errors import first_line


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """`reason` is one line that says what is wrong; None where nothing is.

    `consequence` is what follows from that for someone who uses kvtide here.
    """

    name: str
    reason: str | None
    consequence: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is as it should be."""
        return self.reason is None

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "name": self.name,
            "ok": self.ok,
            "reason": self.reason,
            "consequence": self.consequence or None,
        }


def count_failed(findings: Sequence[Finding]) -> int:
    """How many of them aren't as they should be."""
    return sum(not finding.ok for finding in findings)


def attempt(
    name: str,
    check: Callable[[], str | None],
    *,
    settle: Callable[[], None],
    consequence: str = "",
) -> Finding:
    """Tries `check`, which returns what is wrong or None, or raises.

    `settle` waits for the device, so that what goes wrong late in a check isn't taken for the next
    check's fault. Ctrl-C alone isn't a finding.
    """
    try:
        reason = check()
        settle()
    except Exception as error:  # whatever a device's driver raises
        reason = first_line(error)
        with suppress(Exception):
            settle()
    return Finding(name, reason, consequence if reason is not None else "")
