"""Row rules that only SGLang's pools need. kvtide.layout.rules has the rules for all engines."""

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
    """Keeps only the last `count` tokens of a request, from the beginning of a page: the window.

    SGLang frees the slots of earlier tokens only now and then. So a request may have more slots
    before a retraction than after its return. Both times it has the slots that decoding reads.
    """

    form_name: ClassVar[str] = "sglang.last_tokens"
    count: int
    page_size: int

    def __post_init__(self) -> None:
        """Raises LayoutError for a count below 0 or an empty page."""
        require_integer(self, "count", 0)
        require_integer(self, "page_size", 1)

    def first(self, token_count: int) -> int:
        """The number of the first kept token, of `token_count` tokens."""
        return max(0, token_count - self.count) // self.page_size * self.page_size

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain, since it counts the request's tokens."""
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
    """Looks up a request's pages in a table [request, page of the request], flat as a map.

    It is for caches whose pages are allocated independently of the tokens' slots. A page holds
    `entries` entries, each for `tokens` tokens. Incomplete entries have no page yet.
    """

    form_name: ClassVar[str] = "sglang.pages_of_request"
    local: ClassVar[Mapping[str, int]] = {"columns": 0}
    name: str
    columns: int
    tokens: int
    entries: int
    kind: str = "request"

    def __post_init__(self) -> None:
        """Raises LayoutError for names that aren't strings, and for empty pages."""
        _check_table(self)
        require_integer(self, "tokens", 1)
        require_integer(self, "entries", 1)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain. Raises SlotError for a missing page (0)."""
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
    """Looks up a request's rows in a table [request, entry of the request], flat as a map.

    Entry n stands for the `count` tokens from token n * `stride` on, so a token may belong to
    several entries. An entry has a row once its last token is written.
    """

    form_name: ClassVar[str] = "sglang.entries_of_request"
    local: ClassVar[Mapping[str, int]] = {"columns": 0}
    name: str
    columns: int
    count: int
    stride: int
    kind: str = "request"

    def __post_init__(self) -> None:
        """Raises LayoutError for names that aren't strings, and for empty entries."""
        _check_table(self)
        require_integer(self, "count", 1)
        require_integer(self, "stride", 1)

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule. It must be the first of its chain. Raises SlotError for a missing row (0)."""
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
    """The LastTokens rule with which all these chains begin, or None.

    Chains for rows of requests are ignored: they have no tokens.
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
    """The request's entries in the rule's table at `numbers`. An entry of 0 is missing.

    `words` name what the numbers count, in the plural and in the singular, for errors.
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
