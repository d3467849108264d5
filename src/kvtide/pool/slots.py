"""PageAllocator: which pages are free. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from kvtide.errors import SlotError
from kvtide.integers import LARGEST, checked_integer, integer_of, shown


@final
class PageAllocator:
    """Hands out the pages 0 to `page_count` - 1, each to one holder at a time.

    Free and held pages are together all pages, always. Not thread-safe: one thread schedules.
    """

    def __init__(self, page_count: int) -> None:
        """Raises SlotError for what is no count of pages."""
        page_count = self.page_count = checked_integer(page_count, "page allocator: page_count")
        # Last in, first out: a page that was just released is likely still in cache.
        self._free = list(range(page_count - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free_count(self) -> int:
        """Pages that can be acquired now."""
        return len(self._free)

    @property
    def held_count(self) -> int:
        """Pages that someone holds."""
        return len(self._held)

    def acquire(self, count: int) -> list[int] | None:
        """`count` distinct pages, or None and nothing taken when fewer are free.

        Zero is a valid count. Raises SlotError for what is no count, as a negative one.
        """
        number = integer_of(count)
        if number is None or not 0 <= number <= LARGEST:
            raise SlotError(f"page allocator: can't acquire {shown(count)} pages")
        count = number
        if count > len(self._free):
            return None
        # Not `[-count:]`, which is the whole list when count is 0.
        first = len(self._free) - count
        pages = self._free[first:][::-1]
        del self._free[first:]
        self._held.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Takes pages back; raises SlotError, and takes none, if one isn't held or comes twice."""
        try:
            given = list(pages)
        except TypeError as error:
            raise SlotError(
                f"page allocator: {shown(pages)} can't be the pages to release"
            ) from error
        returned: list[int] = []
        seen: set[int] = set()
        for one in given:
            page = integer_of(one)  # 1.0 is found in a set that has 1, and would be handed out
            if page is None or page not in self._held or page in seen:
                what = "comes twice" if page in seen else "isn't held"
                raise SlotError(f"page allocator: page {shown(one)} of {self.page_count} {what}")
            seen.add(page)
            returned.append(page)
        self._held.difference_update(seen)
        self._free.extend(reversed(returned))
