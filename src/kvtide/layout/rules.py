"""The row rules that all engines share: from a request's token slots to the rows of a buffer.

Their interface is in kvtide.layout.rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import LayoutError, SlotError
from kvtide.integers import LARGEST
from kvtide.layout.rule import Counts, Ids, Maps, Rows, Rule, require_integer, require_name


@final
@dataclass(frozen=True, slots=True)
class EveryToken(Rule):
    """Attention without a window: token slot s owns row s of each layer."""

    form_name: ClassVar[str] = "every_token"

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        return rows

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return id_count

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1

    @property
    def is_dense(self) -> bool:
        """See Rule."""
        return True

    @property
    def is_identity(self) -> bool:
        """See Rule."""
        return True


@final
@dataclass(frozen=True, slots=True)
class EveryNth(Rule):
    """`count` consecutive slots share a row: a page, or a row of a compressed cache.

    A row moves whole, so a token must have the same place in its row at the source and at the
    target. Therefore the slots of a row begin at its first slot and follow each other.
    """

    form_name: ClassVar[str] = "every_nth"
    count: int

    def __post_init__(self) -> None:
        """Raises LayoutError for rows of less than a slot."""
        require_integer(self, "count", 1)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        ids, count = rows.ids, self.count
        follows = np.zeros(ids.size, bool)
        follows[1:] = (ids[1:] == ids[:-1] + 1) & (ids[1:] % count != 0)
        if rows.after_hole is not None:
            follows &= ~rows.after_hole
        wrong = ~follows & (ids % count != 0)
        if wrong.any():
            first = int(wrong.argmax())
            raise SlotError(
                f"slot {ids[first]} at position {first} stands in the middle of a row of {count}, "
                "and the slots or tokens before it aren't there; begin such a row at its first "
                "slot, and leave no token out inside it"
            )
        ends = np.ones(ids.size, bool)
        ends[:-1] = ~follows[1:]
        lasts = rows.tokens if rows.lasts is None else rows.lasts
        firsts = np.flatnonzero(~follows)
        return Rows(
            ids[firsts] // count, rows.tokens[firsts], lasts[ends], self._holes(rows, firsts)
        )

    def _holes(self, rows: Rows, firsts: Ids) -> NDArray[np.bool_] | None:
        """Which of the rows that begin at `firsts` don't continue the row before them, since that
        row isn't full or a hole lies between the two."""
        holes = np.zeros(firsts.size, bool)
        holes[1:] = np.diff(firsts) < self.count
        if rows.after_hole is not None:
            holes |= rows.after_hole[firsts]
        return holes if holes.any() else None

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return -(-id_count // self.count)

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return self.count

    @property
    def is_dense(self) -> bool:
        """See Rule."""
        return True

    @property
    def is_identity(self) -> bool:
        """See Rule."""
        return self.count == 1


@final
@dataclass(frozen=True, slots=True)
class Mapped(Rule):
    """An engine's map leads from slots to rows, as for a sliding window: slot s owns row map[s].

    Ids that map to `hole` or less own nothing: these tokens have left the window.
    """

    form_name: ClassVar[str] = "mapped"
    local: ClassVar[Mapping[str, int]] = {"hole": -1}
    name: str
    hole: int = -1

    def __post_init__(self) -> None:
        """Raises LayoutError for a name that is no string, or a hole that is no integer."""
        require_name(self, "name")
        require_integer(self, "hole", -LARGEST)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        if self.name not in maps:
            raise SlotError(f"there is no map {self.name!r}; the pool has {sorted(maps)}")
        mapped = maps[self.name](rows.ids)
        inside = mapped > self.hole
        found = rows.only(inside, mapped[inside])
        gaps = np.zeros(found.ids.size, bool)
        gaps[1:] = np.diff(np.flatnonzero(inside)) > 1
        if found.after_hole is not None:
            gaps |= found.after_hole
        return replace(found, after_hole=gaps) if gaps.any() else found

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return known.mapped_rows.get(self.name, 0)

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1

    @property
    def map_name(self) -> str:
        """See Rule."""
        return self.name

    def with_map_under(self, prefix: str) -> Mapped:
        """See Rule."""
        return replace(self, name=f"{prefix}.{self.name}")


@final
@dataclass(frozen=True, slots=True)
class Striped(Rule):
    """Ranks share a context: each in turn keeps `run` consecutive slots, and `rank` is this one.

    The engine's allocator gives token n a slot that equals n modulo `world * run`. Each rank then
    keeps the same tokens wherever the request lies, and a restore never needs another rank's
    bytes. The rule checks this, since it depends on the allocator.
    """

    form_name: ClassVar[str] = "striped"
    rank: int
    world: int
    run: int = 1

    def __post_init__(self) -> None:
        """Raises LayoutError for a rank that isn't in 0 … `world` - 1, or a `run` below 1."""
        require_integer(self, "world", 1)
        require_integer(self, "run", 1)
        require_integer(self, "rank", 0)
        if self.rank >= self.world:
            raise LayoutError(f"Striped: rank {self.rank} isn't in 0 … {self.world - 1}")

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. Raises SlotError for a slot that isn't in its token's place."""
        ids, turns = rows.ids, self.world * self.run
        astray = (ids - rows.tokens) % turns != 0
        if astray.any():
            first = int(astray.argmax())
            raise SlotError(
                f"token {rows.tokens[first]} has slot {ids[first]}, so that another rank would "
                f"keep it than elsewhere: {self.world} ranks take turns of {self.run} slots here, "
                f"and a token's slot must equal its number modulo {turns}"
            )
        kept = ids // self.run % self.world == self.rank
        local = ids // turns * self.run + ids % self.run
        return rows.only(kept, local[kept])

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return -(-id_count // (self.world * self.run)) * self.run

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1


@final
@dataclass(frozen=True, slots=True)
class OfRequest(Rule):
    """One row for the whole request, as for recurrent state. The caller names the row.

    A request may have rows of several kinds, each numbered on its own; `kind` says which of them
    the rule needs.
    """

    form_name: ClassVar[str] = "of_request"
    kind: str = "request"

    def __post_init__(self) -> None:
        """Raises LayoutError for a kind that is no string."""
        require_name(self, "kind")

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. The row is in `maps`, under `kind`."""
        if self.kind not in maps:
            name = "request=ROW" if self.kind == "request" else f"request={{{self.kind!r}: ROW}}"
            raise SlotError(f"this layout has a row for each {self.kind}; name it: {name}")
        return Rows(maps[self.kind](rows.ids), np.zeros(1, np.int64))

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return known.request_count

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 0


def request_kinds(rules: Iterable[Rule]) -> frozenset[str]:
    """The kinds of rows that a request has by these rules."""
    return frozenset(rule.kind for rule in rules if rule.kind is not None)


def apply_rules(rules: Sequence[Rule], slots: Ids, maps: Maps, row_count: int) -> Rows:
    """The rows to which `rules`, one after another, lead from `slots` (checked, int64 [token]).

    Raises SlotError for a row that isn't in 0 … `row_count` - 1, or that two tokens name.
    """
    rows = Rows(slots, np.arange(slots.size, dtype=np.int64))
    if not rules:
        return rows  # the caller has checked the slots
    for rule in rules:
        rows = rule.apply(rows, maps)
    outside = (rows.ids < 0) | (rows.ids >= row_count)
    if outside.any():
        first = int(outside.argmax())
        token, row = rows.tokens[first], rows.ids[first]
        raise SlotError(f"token {token} names row {row}, which isn't in 0 … {row_count - 1}")
    ordered = np.sort(rows.ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        tokens = rows.tokens[rows.ids == repeated[0]]
        raise SlotError(f"tokens {tokens[0]} and {tokens[1]} both name row {repeated[0]}")
    return rows
