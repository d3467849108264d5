"""Integers that a caller gives: one, or many in a row. Pure: no torch, no I/O.

An integer is Python's, numpy's, or a tensor without axes on the host. A bool is none here, nor is
2.0, "2" or a list of one: rounding and converting would guess what was meant, and a wrong guess
is another request's bytes.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import KvtideError, SlotError

Ids = NDArray[np.int64]

LARGEST = 2**63 - 1
_PLAIN = {int, np.int32, np.int64}


def integer_of(value: object) -> int | None:
    """The value as an int, or None where it isn't exactly one integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        if not isinstance(value, int):
            kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
            place = str(getattr(value, "device", "cpu")).partition(":")[0]
            is_one = getattr(value, "shape", None) == () and kind.startswith(("int", "uint"))
            if not is_one or place != "cpu" or np.ma.is_masked(value):
                return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # whatever a caller's object raises when it is read
        return None


def checked_integer(
    value: object, what: str, *, least: int = 0, error: type[KvtideError] = SlotError
) -> int:
    """The value as an int from `least` to 2**63 - 1; `error`, with `what` it was for, otherwise."""
    number = integer_of(value)
    if number is None or not least <= number <= LARGEST:
        raise error(f"{what} must be an integer from {least}, not {shown(value)}")
    return number


def integers_of(values: Any, what: str, axis: str = "token") -> Ids:
    """A copy of the integers in a row as int64 [`axis`], none of which is larger than 2**63 - 1.

    Takes whatever numpy takes for integers, and tensors that lie on a device; for those it
    blocks. Raises SlotError, with `what` each of them is, for anything else.
    """
    try:
        found = _array_of(values)
    except Exception as error:  # whatever a caller's object raises when it is read
        raise SlotError(f"{what}s must be integers [{axis}]: {error}") from error
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SlotError(f"{what}s must be integers [{axis}], not {shown(values)}")
    numbers = found.astype(np.int64)
    if found.dtype == np.uint64 and (numbers < 0).any():
        at = int((numbers < 0).argmax())
        raise SlotError(f"{what} {found[at]} at position {at} is larger than {LARGEST}")
    return numbers


def _array_of(values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise ValueError("some of them are masked")
    if not isinstance(values, list | tuple):
        return np.asarray(values.cpu().numpy() if hasattr(values, "cpu") else values)
    # numpy would take a bool among integers for one of them.
    is_plain = {*map(type, values)} <= _PLAIN
    numbers = values if is_plain else [integer_of(one) for one in values]
    try:
        return np.array(numbers, np.int64)
    except (TypeError, OverflowError) as error:
        at = next(at for at, one in enumerate(numbers) if one is None or abs(one) > LARGEST)
        raise ValueError(f"{shown(values[at])} at position {at} is none") from error


def shown(value: object) -> str:
    """A value for an error's text: short, and of an array or a tensor what it is."""
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            axes = tuple(value.shape)
            place = str(getattr(value, "device", "cpu"))
            where = "" if place == "cpu" else f" on {place}"
            if axes or where:
                return f"{value.dtype} {list(axes)}{where}"
        return reprlib.repr(value)
    except Exception:  # the object's own, or an integer of more digits than Python writes
        return f"<{type(value).__name__}>"
