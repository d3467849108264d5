"""Finding: one thing that was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from kvtide.errors import first_line


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """`reason` is why it isn't as it should be, on one line; None where it is.

    `consequence` is what follows from that for someone who uses kvtide on this device.
    """

    name: str
    reason: str | None
    consequence: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is as it should be."""
        return self.reason is None


def attempt(
    name: str,
    check: Callable[[], str | None],
    *,
    settle: Callable[[], None],
    consequence: str = "",
) -> Finding:
    """Tries `check`, which returns what is wrong or None, or raises.

    `settle` waits for the device: what goes wrong late in a check is its own, and not the next
    one's. Ctrl-C alone isn't a finding.
    """
    try:
        reason = check()
        settle()
    except Exception as error:  # whatever a device's driver raises
        reason = first_line(error)
        with suppress(Exception):
            settle()
    return Finding(name, reason, consequence if reason is not None else "")
