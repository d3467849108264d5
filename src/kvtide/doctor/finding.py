"""Finding: the result of one check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from kvtide.errors import first_line


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `reason` is one line that says what is wrong; None if nothing is.

    `consequence` says what that means for someone who uses kvtide here.
    """

    name: str
    reason: str | None
    consequence: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.reason is None

    def to_json(self) -> dict[str, object]:
        """The finding as one object."""
        return {
            "name": self.name,
            "ok": self.ok,
            "reason": self.reason,
            "consequence": self.consequence or None,
        }


def count_failed(findings: Sequence[Finding]) -> int:
    """How many findings have failed."""
    return sum(not finding.ok for finding in findings)


def attempt(
    name: str,
    check: Callable[[], str | None],
    *,
    settle: Callable[[], None],
    consequence: str = "",
) -> Finding:
    """Runs `check`, which returns what is wrong, or None, or raises an error.

    `settle` waits for the device, so that a late error isn't taken for an error of the next check.
    Every error except Ctrl-C is a finding.
    """
    try:
        reason = check()
        settle()
    except Exception as error:  # a device's driver may raise anything
        reason = first_line(error)
        with suppress(Exception):
            settle()
    return Finding(name, reason, consequence if reason is not None else "")
