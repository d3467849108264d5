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
def test_integers_of_python_numpy_and_torch_are_accepted(value: Any) -> None:
    """They come out as Python's."""
    assert (1, int) == (integer_of(value), type(integer_of(value)))


@pytest.mark.parametrize("value", [None, *NO_INTEGERS], ids=name_of)
def test_a_value_that_python_would_convert_is_no_integer(value: Any) -> None:
    """A wrong guess would reach another row."""
    assert integer_of(value) is None


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_the_error_names_what_was_given(value: Any) -> None:
    """It also names the purpose, and it is of the class that the caller asked for."""
    with pytest.raises(LayoutError, match="bytes must be an integer from 0, not ") as raised:
        checked_integer(value, "bytes", error=LayoutError)
    assert shown(value) in str(raised.value)


def test_a_tensor_on_a_device_is_no_integer_until_somebody_waits_for_it() -> None:
    """Reading it would block, or give the value from before the device has computed it."""
    with simulated("lazy") as name:
        on_device = torch.tensor(1).to(name)
        assert integer_of(on_device) is None
        with pytest.raises(SlotError, match=r"must be an integer from 0, not torch.int64"):
            checked_integer(on_device, "row")


def test_the_caller_says_the_least_value() -> None:
    """Zero pages are valid, a page of zero tokens is invalid."""
    assert 0 == checked_integer(0, "pages")
    with pytest.raises(SlotError, match="pages must be an integer from 1, not 0"):
        checked_integer(0, "pages", least=1)


@given(st.lists(st.integers(0, 99), max_size=9), st.data())
def test_a_bad_value_among_integers_is_named(numbers: list[int], data: st.DataObject) -> None:
    """numpy takes [True, 2] for [1, 2]. The error names the position of the bad value."""
    assert numbers == integers_of(numbers, "slot").tolist()
    place = data.draw(st.integers(0, len(numbers)))
    value = data.draw(st.sampled_from([True, np.bool_(False), torch.tensor(True), "1", 2.0, 2**63]))
    with pytest.raises(SlotError, match=f"slots must be integers.* position {place} isn't an int"):
        integers_of([*numbers[:place], value, *numbers[place:]], "slot")


def test_a_list_may_mix_integers_of_python_numpy_and_torch() -> None:
    """Engines collect such lists."""
    assert [1] * len(ONES) == integers_of(ONES, "slot").tolist()


def test_an_array_with_masked_entries_is_no_row_of_integers() -> None:
    """numpy would give the values under the mask."""
    slots = np.ma.array([1, 2, 3], mask=[False, True, False])
    with pytest.raises(SlotError, match=r"slots must be integers .*some of them are masked"):
        integers_of(slots, "slot")
    assert [1, 2, 3] == integers_of(np.ma.array([1, 2, 3]), "slot").tolist()


def test_an_object_that_fails_to_be_read_is_no_row_of_integers() -> None:
    """The object's error is the cause."""

    class Unreadable:
        def cpu(self) -> None:
            raise KeyError("unreadable")

    with pytest.raises(SlotError, match="unreadable") as raised:
        integers_of(Unreadable(), "slot")
    assert isinstance(raised.value.__cause__, KeyError)
