"""What the scheduler tells the workers about their blocks, and what they answer. Pure.

A block has a key: bytes that name its tokens, and which of the model's groups of layers it is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

_GROUP_BYTES = 4


def group_of(key: bytes) -> int:
    """The number that vLLM's configuration gives to a key's group of layers."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


@final
@dataclass(slots=True)
class Orders:
    """What a worker does before the moves of a step: first it forgets, then it fetches."""

    forget: list[bytes] = field(default_factory=list)
    """Blocks whose host memory is free for others."""
    fetch: list[bytes] = field(default_factory=list)
    """Blocks to bring from a tier to host memory."""
    reset_number: int = 0
    """Unless 0, nothing that was saved before this reset is used any more, in no tier either."""

    def __bool__(self) -> bool:
        return bool(self.forget or self.fetch or self.reset_number)


@final
@dataclass(slots=True)
class BlockReport:
    """What has happened to blocks since a worker's last report. Reports of several ranks add up."""

    fetched: Counter[bytes] = field(default_factory=Counter)
    """Blocks that came to host memory, and on how many ranks."""
    missing: set[bytes] = field(default_factory=set)
    """Blocks that no tier of a rank gave back."""
    lost: set[bytes] = field(default_factory=set)
    """Blocks that aren't in a rank's host memory after all: not saved, or with wrong bytes."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often something happened, by the names of `COUNTS`."""

    def __bool__(self) -> bool:
        return bool(self.fetched or self.missing or self.lost or self.counts)

    def add(self, other: BlockReport) -> None:
        """Adds what another rank reports."""
        self.fetched += other.fetched
        self.missing |= other.missing
        self.lost |= other.lost
        self.counts += other.counts


@final
@dataclass(frozen=True, slots=True)
class Start:
    """What the scheduler must know of a rank before the first request."""

    block_count: int
    """How many blocks its host memory holds."""
    names: frozenset[str] = frozenset()
    """The names of the files that its disk has from earlier processes."""
    tier_blocks: int = 0
    """About how many blocks its tiers hold at most; 0 without a tier."""


COUNTS = {
    "saved_blocks": "Blocks that kvtide saved to host memory.",
    "loaded_blocks": "Blocks that kvtide loaded from host memory.",
    "fetched_blocks": "Blocks that came from a tier to host memory.",
    "written_blocks": "Blocks that were written to a tier.",
    "unsaved_blocks": "Blocks that weren't saved: host memory was full, the copy failed, or "
    "nobody can tell their adapter's weights.",
    "unwritten_blocks": "Blocks that left host memory before a tier had them.",
    "failed_writes": "Blocks that no tier took.",
    "failed_loads": "Loads that failed. By vLLM's policy the request is computed again, or ends.",
    "missing_blocks": "Blocks that no tier gave back.",
    "restored_tokens": "Tokens of preempted requests that came back from host memory.",
    "recomputed_tokens": "Tokens of preempted requests that are computed again.",
    "damaged_blocks": "Blocks with wrong bytes, in host memory or in a tier. None was used.",
}
"""For each count its meaning, as a metric's help text."""


def names_of(counts: Iterable[str]) -> list[str]:
    """The names of counts as metrics."""
    return [f"vllm:kvtide_{name}_total" for name in counts]
