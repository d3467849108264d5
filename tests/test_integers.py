from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError, SlotError
from kvtide.integers import checked_integer, integer_of, integers_of, shown
from support.simulated import simulated
from support.values import NO_INTEGERS, NO_ROWS, ONES, name_of


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_integers_of_all_makers_are_one(value: Any) -> None:
    """Python's, numpy's and torch's; what comes out is Python's."""
    assert (1, int) == (integer_of(value), type(integer_of(value)))


@pytest.mark.parametrize("value", [None, *NO_INTEGERS], ids=name_of)
def test_what_python_would_convert_is_no_integer(value: Any) -> None:
    """A guess at what was meant would be another row."""
    assert integer_of(value) is None


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_the_error_names_what_was_given(value: Any) -> None:
    """And what for; it is the caller's kind of error."""
    with pytest.raises(LayoutError, match="bytes must be an integer from 0, not ") as raised:
        checked_integer(value, "bytes", error=LayoutError)
    assert shown(value) in str(raised.value)


def test_a_tensor_on_a_device_is_no_integer_until_somebody_waits_for_it() -> None:
    """To read it would block, and give what is there before the device has come to it."""
    with simulated("lazy") as name:
        on_device = torch.tensor(1).to(name)
        assert integer_of(on_device) is None
        with pytest.raises(SlotError, match=r"must be an integer from 0, not torch.int64"):
            checked_integer(on_device, "row")


def test_the_least_is_the_callers() -> None:
    """Zero pages can be meant, a page of zero tokens can't."""
    assert 0 == checked_integer(0, "pages")
    with pytest.raises(SlotError, match="pages must be an integer from 1, not 0"):
        checked_integer(0, "pages", least=1)


@given(st.lists(st.integers(0, 99), max_size=9), st.data())
def test_one_that_is_none_is_found_among_integers(numbers: list[int], data: st.DataObject) -> None:
    """numpy takes [True, 2] for [1, 2]: the position is named, wherever it is."""
    assert numbers == integers_of(numbers, "slot").tolist()
    at = data.draw(st.integers(0, len(numbers)))
    value = data.draw(st.sampled_from([True, np.bool_(False), torch.tensor(True), "1", 2.0, 2**63]))
    with pytest.raises(SlotError, match=f"slots must be integers.* at position {at} is none"):
        integers_of([*numbers[:at], value, *numbers[at:]], "slot")


def test_integers_of_several_makers_stand_together() -> None:
    """As engines collect them."""
    assert [1] * len(ONES) == integers_of(ONES, "slot").tolist()


def test_an_array_with_masked_entries_is_no_row_of_integers() -> None:
    """numpy would give what lies under the mask."""
    slots = np.ma.array([1, 2, 3], mask=[False, True, False])
    with pytest.raises(SlotError, match=r"slots must be integers .*some of them are masked"):
        integers_of(slots, "slot")
    assert [1, 2, 3] == integers_of(np.ma.array([1, 2, 3]), "slot").tolist()


def test_an_object_that_fails_to_be_read_is_no_row_of_integers() -> None:
    """Its own error is the cause."""

    class Unreadable:
        def cpu(self) -> None:
            raise KeyError("of its own")

    with pytest.raises(SlotError, match="of its own") as raised:
        integers_of(Unreadable(), "slot")
    assert isinstance(raised.value.__cause__, KeyError)
