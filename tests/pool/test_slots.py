from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.errors import SlotError
from kvtide.pool import PageAllocator
from kvtide.pool.slots import checked_slots
from support.values import NO_ROWS, ONES, name_of

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


class AllocatorMachine(RuleBasedStateMachine):
    """Calls the allocator in any order, validly or not, and keeps a set of the held pages."""

    @initialize(page_count=st.integers(0, 9))
    def start(self, page_count: int) -> None:
        """Makes an allocator of a few pages, or of none."""
        self.allocator = PageAllocator(page_count)
        self.page_count = page_count
        self.held: set[int] = set()

    @rule(count=st.integers(0, 11))
    def acquire(self, count: int) -> None:
        """Gives as many free pages as requested, or none at all."""
        pages = self.allocator.acquire(count)
        if count > self.page_count - len(self.held):
            assert pages is None
        else:
            assert pages is not None
            assert count == len(pages) == len(set(pages))
            assert self.held.isdisjoint(pages)
            assert set(pages) <= set(range(self.page_count))
            self.held.update(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Releases some or all of the held pages, in any order."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True)
                          if self.held else st.just([]))  # fmt: skip
        self.allocator.release(pages)
        self.held.difference_update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_twice(self, data: st.DataObject) -> None:
        """A page that comes twice in one release is refused, and nothing is released."""
        pages = sorted(self.held)
        repeated = data.draw(st.permutations([*pages, data.draw(st.sampled_from(pages))]))
        with pytest.raises(SlotError, match="comes twice"):
            self.allocator.release(repeated)

    @rule(data=st.data(), outside=st.integers(-3, 12))
    def release_foreign(self, data: st.DataObject, outside: int) -> None:
        """A free or unknown page among held ones is refused, and nothing is released."""
        if outside not in self.held:
            pages = data.draw(st.permutations([*sorted(self.held), outside]))
            with pytest.raises(SlotError, match=f"page {outside} of .* isn't held"):
                self.allocator.release(pages)

    @rule(count=st.integers(-9, -1))
    def acquire_negative(self, count: int) -> None:
        """A negative count is an error, not a slice from the wrong end."""
        with pytest.raises(SlotError, match=f"can't acquire {count} pages"):
            self.allocator.acquire(count)

    @invariant()
    def books_balance(self) -> None:
        """Free and held pages together are all pages."""
        if hasattr(self, "allocator"):
            assert len(self.held) == self.allocator.held_count
            assert self.page_count - len(self.held) == self.allocator.free_count

    def teardown(self) -> None:
        """Held pages can be released, and then all pages be acquired at once."""
        self.allocator.release(sorted(self.held))
        assert list(range(self.page_count)) == sorted(self.allocator.acquire(self.page_count) or [])


AllocatorMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)
TestAllocator = AllocatorMachine.TestCase


def test_acquiring_zero_pages_takes_none() -> None:
    """Zero is a valid count, with pages free and without; a slice [-0:] would be all."""
    allocator = PageAllocator(3)
    assert [] == allocator.acquire(0)
    assert 3 == allocator.free_count
    allocator.acquire(3)
    assert [] == allocator.acquire(0)


def test_the_last_page_can_be_acquired_and_no_more() -> None:
    """All pages can be acquired; then the result is None."""
    allocator = PageAllocator(3)
    assert [0, 1, 2] == allocator.acquire(3)
    assert allocator.acquire(1) is None
    assert (0, 3) == (allocator.free_count, allocator.held_count)


def test_too_many_pages_takes_none() -> None:
    """The free pages stay free."""
    allocator = PageAllocator(3)
    allocator.acquire(1)
    assert allocator.acquire(3) is None
    assert (2, 1) == (allocator.free_count, allocator.held_count)


def test_the_caller_owns_the_list() -> None:
    """Changing it doesn't change the allocator."""
    allocator = PageAllocator(4)
    pages = allocator.acquire(2)
    assert pages is not None
    pages.clear()
    assert (2, 2) == (allocator.free_count, allocator.held_count)


def test_pages_released_last_are_handed_out_first() -> None:
    """They are likely still in cache."""
    allocator = PageAllocator(5)
    allocator.acquire(5)
    allocator.release([3, 1])
    allocator.release([4])
    assert [4, 3, 1] == allocator.acquire(3)


def test_a_generator_of_pages_is_read_once() -> None:
    """Pages may come from any iterable."""
    allocator = PageAllocator(4)
    allocator.acquire(4)
    allocator.release(page for page in (0, 2))
    assert 2 == allocator.free_count


def test_a_negative_page_count_is_refused() -> None:
    """The message has the count."""
    with pytest.raises(SlotError, match="page_count must be an integer from 0, not -1"):
        PageAllocator(-1)


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_count_is_refused(value: Any) -> None:
    """The allocator's error is raised, and nothing is acquired."""
    allocator = PageAllocator(3)
    with pytest.raises(SlotError, match="can't acquire"):
        allocator.acquire(value)
    with pytest.raises(SlotError, match="page_count"):
        PageAllocator(value)
    assert (3, 0) == (allocator.free_count, allocator.held_count)


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_page_is_not_released(value: Any) -> None:
    """A set that has 1 also finds 1.0 and True: the next holder would get 1.0 for a page."""
    allocator = PageAllocator(3)
    allocator.acquire(3)
    for pages in ([value], [0, value]):
        with pytest.raises(SlotError):
            allocator.release(pages)
    assert (0, 3) == (allocator.free_count, allocator.held_count)


@pytest.mark.parametrize("pages", [None, 1, 1.5, torch.tensor(1)], ids=name_of)
def test_an_invalid_list_of_pages_is_not_released(pages: Any) -> None:
    """A single page is no list of pages."""
    allocator = PageAllocator(3)
    allocator.acquire(3)
    with pytest.raises(SlotError, match="pages"):
        allocator.release(pages)


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_pages_may_be_numpy_or_torch_integers(value: Any) -> None:
    """Pages that are handed out again are Python's integers."""
    allocator = PageAllocator(value)
    assert [0] == allocator.acquire(value)
    other = PageAllocator(3)
    other.acquire(3)
    other.release([value])
    pages = other.acquire(1)
    assert [1] == pages
    assert [int] == [type(page) for page in pages]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_slots_of_any_integer_dtype_are_accepted(dtype: type[np.integer[Any]]) -> None:
    """They become int64."""
    ids = checked_slots(np.array([5, 0, 99], dtype), 300)
    assert ([5, 0, 99], "int64") == (ids.tolist(), ids.dtype.name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_slots_may_be_tensors(dtype: torch.dtype) -> None:
    """Engines have tensors of slots."""
    assert [5, 0, 9] == checked_slots(torch.tensor([5, 0, 9], dtype=dtype), 10).tolist()


@pytest.mark.parametrize("slots", [range(2, 5), (2, 3, 4), [2, 3, 4], np.arange(9)[2:5]])
def test_slots_may_be_any_sequence(slots: Any) -> None:
    """Ranges, tuples, lists and slices are accepted."""
    assert [2, 3, 4] == checked_slots(slots, 5).tolist()


@pytest.mark.parametrize("slots", [[], (), range(0), np.empty(0, np.int32), torch.empty(0)])
def test_no_slots_are_valid(slots: Any) -> None:
    """Zero tokens are valid, even if numpy can't tell that the slots were integers."""
    ids = checked_slots(slots, 0)
    assert (0, "int64") == (ids.size, ids.dtype.name)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, -1, -2], r"slot -1 at position 1 isn't in 0 … 9"),
        ([3, 10, 11], r"slot 10 at position 1 isn't in 0 … 9"),
        ([3, 11, -1], r"slot 11 at position 1"),
        (np.array([1, 2**63 + 1], np.uint64), r"slot 9223372036854775809 at position 1"),
        (np.array([-128], np.int8), r"slot -128 at position 0"),
        ([7, 3, 7, 3], r"slot 7 at position 2 is repeated"),
        ([1, 3, 2, 3, 1, 2], r"slot 3 at position 3 is repeated"),
        ([0, 0], r"slot 0 at position 1 is repeated"),
    ],
)
def test_the_first_invalid_slot_is_named(slots: Any, message: str) -> None:
    """The error has its position; an unknown slot is named before a repeated one."""
    with pytest.raises(SlotError, match=message):
        checked_slots(slots, 10)


@pytest.mark.parametrize(
    "slots",
    [
        [1.0, 2.0], [True, False], np.array([1, 2], bool), torch.tensor([1.0]), [[1, 2]],
        np.zeros((0, 2), int), np.zeros((2, 0), int), 3, None, "12", [1, None], [2**70], {1, 2},
        [[1, 2], [3]], torch.tensor([1.0], dtype=torch.bfloat16), torch.empty(2, device="meta"),
        SimpleNamespace(cpu=int),
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_slots_are_refused(slots: Any) -> None:
    """Floats, masks, matrices, single numbers and sets are ambiguous."""
    with pytest.raises(SlotError, match="slots must be integers"):
        checked_slots(slots, 10)


@given(st.lists(st.integers(0, 30), unique=True, max_size=9), st.integers(0, 9))
def test_padding_slots_are_refused(slots: list[int], padding: int) -> None:
    """The first one is named; in a pool without padding slot 0 is an ordinary slot."""
    bad = [slot for slot in slots if slot < padding]
    if not bad:
        assert slots == checked_slots(slots, 31, padding).tolist()
        return
    with pytest.raises(SlotError, match=f"slot {bad[0]} at position {slots.index(bad[0])} is padd"):
        checked_slots(slots, 31, padding)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_checked_slots_are_a_copy(make: Any) -> None:
    """A later write to the caller's array doesn't change what moves."""
    slots = make([1, 2, 3])
    ids = checked_slots(slots, 10)
    slots[:] = 7
    assert [1, 2, 3] == ids.tolist()
