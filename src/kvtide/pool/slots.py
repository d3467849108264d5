"""Slots and pages: checks slots, and hands out pages. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat, starmap
from operator import itemgetter
from typing import Any, final

import numpy as np

from kvtide.atomic import call_each
from kvtide.errors import SlotError
from kvtide.integers import LARGEST, checked_integer, integer_of, integers_of, shown
from kvtide.layout import Ids


@final
class PageAllocator:
    """Hands out the pages 0 to `page_count` - 1, each to one holder at a time.

    A page is either free or held: free and held pages are always all pages. Not thread-safe, since
    one thread schedules.
    """

    def __init__(self, page_count: int) -> None:
        """Raises SlotError for an invalid count of pages."""
        page_count = self.page_count = checked_integer(page_count, "page allocator: page_count")
        # Last in, first out: a page that was just released is likely still in cache.
        self._free: dict[int, None] = dict.fromkeys(range(page_count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Pages that can be acquired now."""
        return len(self._free)

    @property
    def held_count(self) -> int:
        """Pages that are held."""
        return self.page_count - len(self._free)

    def acquire(self, count: int) -> list[int] | None:
        """Acquires `count` pages; None, and no page, if fewer are free.

        Zero is a valid count. Raises SlotError for anything else that isn't a positive integer.
        """
        pages: list[int] = []
        try:
            return pages if self.acquire_to(pages, count) else None
        except BaseException:
            self.give_back(pages)
            raise

    def acquire_to(self, pages: list[int], count: int) -> bool:
        """Appends `count` pages to the caller's list; False, and no page, if fewer are free.

        The caller's list says what it holds wherever Ctrl-C comes. Raises SlotError for an invalid
        count.
        """
        number = integer_of(count)
        if number is None or not 0 <= number <= LARGEST:
            raise SlotError(f"page allocator: can't acquire {shown(count)} pages")
        count = number
        if count > len(self._free):
            return False
        pages.extend(map(itemgetter(0), starmap(self._free.popitem, repeat((), count))))
        return True

    def release(self, pages: Iterable[int]) -> None:
        """Takes pages back. Raises SlotError, and takes none, if one isn't held or is repeated."""
        self.give_back(self.check_held(pages))

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes back pages, held or free already. Repeatable, to undo an `acquire_to`."""
        call_each(self._free.setdefault, reversed(pages))

    def check_held(self, pages: Iterable[int]) -> list[int]:
        """The pages as a list. Raises SlotError for the first page not held or repeated."""
        try:
            given = list(pages)
        except TypeError as error:
            raise SlotError(
                f"page allocator: {shown(pages)} isn't a list of pages to release"
            ) from error
        held: list[int] = []
        seen: set[int] = set()
        for value in given:
            page = integer_of(value)  # 1.0 is found in a set that has 1, and would be handed out
            if page is None or page in seen or not self._is_held(page):
                what = "comes twice" if page in seen else "isn't held"
                raise SlotError(f"page allocator: page {shown(value)} of {self.page_count} {what}")
            seen.add(page)
            held.append(page)
        return held

    def hold_again(self, pages: Sequence[int]) -> None:
        """Holds the pages again after a release that freed all of them, some or none. Repeatable.

        Only valid while nobody has acquired a page since.
        """
        call_each(self._free.pop, pages, repeat(None))

    def _is_held(self, page: int) -> bool:
        return 0 <= page < self.page_count and page not in self._free


def checked_slots(slots: Any, slot_count: int, padding_slots: int = 0) -> Ids:
    """A checked copy of `slots` as int64 [token]. Later changes of the caller's array don't matter.

    Takes integers in a sequence, an array or a tensor; blocks for a tensor on a device. Raises
    SlotError, which names the first bad id, for slots that aren't integers in one dimension, or are
    negative, outside the pool or repeated. The first `padding_slots` slots belong to no token and
    are refused, too: an engine's table has 0 for a token without a slot.
    """
    ids = integers_of(slots, "slot")
    if not ids.size:
        return ids
    ordered = np.sort(ids)
    if ordered[0] < 0 or ordered[-1] >= slot_count:
        bad = int(((ids < 0) | (ids >= slot_count)).argmax())
        raise SlotError(f"slot {ids[bad]} at position {bad} isn't in 0 … {slot_count - 1}")
    if ordered[0] < padding_slots:
        bad = int((ids < padding_slots).argmax())
        raise SlotError(
            f"slot {ids[bad]} at position {bad} is padding, so its token has no slot: the slots of "
            f"this pool begin at {padding_slots}"
        )
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(ids, kind="stable")
        bad = int(order[1:][np.diff(ids[order]) == 0].min())
        raise SlotError(f"slot {ids[bad]} at position {bad} is repeated")
    return ids
