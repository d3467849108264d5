"""What a place for answers is: a stream or a file, and what is kept of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Kept:
    """What `--resume` found: the lines that are kept, by ids, and how many lines aren't used.

    `changed` counts the ids whose answer is to another prompt or by other settings, `others` the
    answers to ids that no prompt has, and `broken` the lines that aren't answers.
    """

    lines: Mapping[str, bytes] = field(default_factory=dict)
    changed: int = 0
    others: int = 0
    broken: int = 0


class Answers(Protocol):
    """Where answers go: `keep`, `begin`, `write` for each prompt, `finish`; in the end `close`.

    All but `place` and `close` raise KvtideError, with the file and the reason, if they fail.
    """

    is_terminal: bool
    """Whether the lines go to a terminal, which may show progress too."""

    def keep(self, keys: Mapping[str, str], header: Mapping[str, Any]) -> Kept:
        """Finds the prompts, given as `id: key`, that have an answer already.

        `header` says what the run is like. Raises UsageError if there are answers and none fits.
        """
        ...

    def begin(self) -> None:
        """Makes room for answers. From here on an answer may be lost that isn't kept."""

    def write(self, prompt_id: str, row: Mapping[str, Any], key: str | None) -> None:
        """Writes the line of a prompt, whole or not at all. A failed prompt has no key."""

    def sync(self) -> None:
        """Waits until all lines are on the disk."""

    def sync_if_due(self) -> None:
        """The same, if there are lines and a second has passed; called once in a while."""

    def finish(self, prompt_ids: Sequence[str]) -> None:
        """Gives the lines the order of the prompts, each of which has one."""

    def place(self) -> str:
        """Where the answers are now, and how to go on, in words; empty where there are none."""
        ...

    def close(self) -> None:
        """Gives up what is open."""
