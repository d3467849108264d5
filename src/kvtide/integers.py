"""Checks integers from a caller, single or in a row. Pure: no torch, no I/O.

An integer is Python's, numpy's, or a tensor without axes on the host. A bool is not an integer
here, nor is 2.0, "2" or [2]. To convert such a value is to guess, and a wrong guess reaches another
request's bytes.
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
    """The value as an int, or None if it isn't a single integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        if not isinstance(value, int):
            kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
            place = str(getattr(value, "device", "cpu")).partition(":")[0]
            is_scalar = getattr(value, "shape", None) == () and kind.startswith(("int", "uint"))
            if not is_scalar or place != "cpu" or np.ma.is_masked(value):
                return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # a caller's object may raise anything when it is read
        return None


def checked_integer(
    value: object, what: str, *, least: int = 0, error: type[KvtideError] = SlotError
) -> int:
    """The value as an int, if it is an integer from `least` to 2**63 - 1.

    Raises `error` otherwise; its message calls the value `what`.
    """
    number = integer_of(value)
    if number is None or not least <= number <= LARGEST:
        raise error(f"{what} must be an integer from {least}, not {shown(value)}")
    return number


def integers_of(values: Any, what: str, axis: str = "token") -> Ids:
    """A copy of the integers in a row, as int64 [`axis`].

    Takes integers in a sequence, an array or a tensor; blocks for a tensor on a device. Raises
    SlotError, which names `what` each integer is, for anything else and above 2**63 - 1.
    """
    try:
        found = _array_of(values)
    except Exception as error:  # a caller's object may raise anything when it is read
        raise SlotError(f"{what}s must be integers [{axis}]: {error}") from error
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SlotError(f"{what}s must be integers [{axis}], not {shown(values)}")
    numbers = found.astype(np.int64)
    if found.dtype == np.uint64 and (numbers < 0).any():
        first = int((numbers < 0).argmax())
        raise SlotError(f"{what} {found[first]} at position {first} is larger than {LARGEST}")
    return numbers


def _array_of(values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise ValueError("some of them are masked")
    if not isinstance(values, list | tuple):
        return np.asarray(values.cpu().numpy() if hasattr(values, "cpu") else values)
    # numpy would convert a bool among integers.
    is_plain = {*map(type, values)} <= _PLAIN
    numbers = values if is_plain else [integer_of(value) for value in values]
    try:
        return np.array(numbers, np.int64)
    except (TypeError, OverflowError) as error:
        first = next(i for i, n in enumerate(numbers) if n is None or abs(n) > LARGEST)
        message = f"{shown(values[first])} at position {first} isn't an integer of 64 bits"
        raise ValueError(message) from error


def shown(value: object) -> str:
    """A value in an error's message: short; an array or a tensor by its dtype and shape."""
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            axes = tuple(value.shape)
            place = str(getattr(value, "device", "cpu"))
            where = "" if place == "cpu" else f" on {place}"
            if axes or where:
                return f"{value.dtype} {list(axes)}{where}"
        return reprlib.repr(value)
    except Exception:  # the object's error, or an integer of more digits than Python prints
        return f"<{type(value).__name__}>"
