"""Row rules that only SGLang's pools need; kvtide.layout.rules has the rules of all engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from kvtide.errors import SlotError
from kvtide.layout import Counts, Ids, Maps, OfRequest, Rows, Rule
from kvtide.layout.rule import require_integer, require_name


@final
@dataclass(frozen=True, slots=True)
class LastTokens(Rule):
    """Only the last `count` tokens of a request, from the beginning of a page: its window.

    SGLang frees slots that have left a window from time to time, not at once. So a request may
    have more slots of a window now than it gets when it comes back. The slots that decoding reads
    are among them both times.
    """

    form_name: ClassVar[str] = "sglang.last_tokens"
    count: int
    page_size: int

    def __post_init__(self) -> None:
        """Raises LayoutError for a count below 0, or pages of no token."""
        require_integer(self, "count", 0)
        require_integer(self, "page_size", 1)

    def first(self, token_count: int) -> int:
        """The number of the first token that is kept of `token_count` tokens."""
        return max(0, token_count - self.count) // self.page_size * self.page_size

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain, as it counts the request's tokens."""
        kept = rows.tokens >= self.first(rows.ids.size)
        return rows.only(kept, rows.ids[kept])

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return id_count

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1


@final
@dataclass(frozen=True, slots=True)
class PagesOfRequest(Rule):
    """Pages that a table of the requests names: [request, page of the request's], flat as a map.

    For caches whose pages are handed out on their own, whatever slots the tokens have: a page
    holds `entries` entries of `tokens` tokens each. Entries that aren't complete have no page yet.
    """

    form_name: ClassVar[str] = "sglang.pages_of_request"
    local: ClassVar[Mapping[str, int]] = {"columns": 0}
    name: str
    columns: int
    tokens: int
    entries: int
    kind: str = "request"

    def __post_init__(self) -> None:
        """Raises LayoutError for names that are no strings, and pages of no token."""
        _check_table(self)
        require_integer(self, "tokens", 1)
        require_integer(self, "entries", 1)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain. Raises SlotError for a page it hasn't: 0."""
        complete = rows.ids.size // self.tokens
        numbers = np.arange(-(-complete // self.entries), dtype=np.int64)
        pages = _in_table(self, rows, maps, numbers, ("pages", "page"))
        firsts = numbers * self.tokens * self.entries
        lasts = np.minimum(firsts + self.tokens * self.entries, rows.ids.size) - 1
        return Rows(pages, firsts, lasts)

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return known.mapped_rows.get(self.name, 0)

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return self.tokens * self.entries

    @property
    def map_name(self) -> str:
        """See Rule."""
        return self.name

    def with_map_under(self, prefix: str) -> PagesOfRequest:
        """See Rule."""
        return replace(self, name=f"{prefix}.{self.name}")


@final
@dataclass(frozen=True, slots=True)
class EntriesOfRequest(Rule):
    """Rows that a table of the requests names: [request, entry of the request's], flat as a map.

    Entry n is of the `count` tokens that begin with token n * `stride`, so that a token may be in
    several of them. It has a row of its own from the step on in which the last of them is written.
    """

    form_name: ClassVar[str] = "sglang.entries_of_request"
    local: ClassVar[Mapping[str, int]] = {"columns": 0}
    name: str
    columns: int
    count: int
    stride: int
    kind: str = "request"

    def __post_init__(self) -> None:
        """Raises LayoutError for names that are no strings, and entries of no token."""
        _check_table(self)
        require_integer(self, "count", 1)
        require_integer(self, "stride", 1)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain. Raises SlotError for a row it hasn't: 0."""
        complete = max(0, (rows.ids.size - self.count) // self.stride + 1)
        numbers = np.arange(complete, dtype=np.int64)
        ids = _in_table(self, rows, maps, numbers, ("entries", "slot for entry"))
        return Rows(ids, numbers * self.stride)

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return known.mapped_rows.get(self.name, 0)

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return self.stride

    @property
    def map_name(self) -> str:
        """See Rule."""
        return self.name

    def with_map_under(self, prefix: str) -> EntriesOfRequest:
        """See Rule."""
        return replace(self, name=f"{prefix}.{self.name}")


def window_of(chains: Iterable[Sequence[Rule]]) -> LastTokens | None:
    """The LastTokens with which all of these chains begin; None if they don't.

    Chains that begin with a request's own row don't count: they have no tokens to leave out.
    """
    firsts = {chain[0] for chain in chains if chain[0].unit != "request"}
    first = firsts.pop() if len(firsts) == 1 else None
    return first if isinstance(first, LastTokens) else None


def _check_table(rule: PagesOfRequest | EntriesOfRequest) -> None:
    require_name(rule, "name")
    require_name(rule, "kind")
    require_integer(rule, "columns", 0)


def _in_table(
    rule: PagesOfRequest | EntriesOfRequest,
    rows: Rows,
    maps: Maps,
    numbers: Ids,
    words: tuple[str, str],
) -> Ids:
    """What the rule's table has for the request under these numbers, 0 on: none may be 0.

    `words` say what the numbers count, and what the request lacks where it has none.
    """
    request = OfRequest(rule.kind).apply(rows, maps).ids[0]
    counted, lacking = words
    if numbers.size > rule.columns:
        raise SlotError(
            f"{rows.ids.size} tokens need {numbers.size} {counted} of {rule.name!r}, whose table "
            f"has {rule.columns} a request"
        )
    ids = maps[rule.name](request * rule.columns + numbers)
    if (ids <= 0).any():
        number = int((ids <= 0).argmax())
        raise SlotError(f"request {request} has no {lacking} {number} of {rule.name!r}")
    return ids
