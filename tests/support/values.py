"""Values that callers give for an integer: correct ones and mistakes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

ONES: list[Any] = [
    1, np.int64(1), np.uint8(1), np.array(1), np.array(1, np.uint16), torch.tensor(1),
    torch.tensor(1, dtype=torch.uint8), torch.tensor(1, dtype=torch.int32),
]  # fmt: skip
"""Each of these is the integer 1."""


class Unreadable:
    """Raises an error for every attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NO_INTEGERS: list[Any] = [
    1.0, 2.5, float("nan"), float("inf"), "1", b"1", True, False, 1 + 0j, Fraction(1), Decimal(1),
    [], [1], (1,), [1, 2], {1}, object(), np.float64(1), np.bool_(True), np.array([1]),
    np.array(1.0), np.array(True), np.timedelta64(1), torch.tensor(2.7), torch.tensor([1]),
    torch.tensor(True), torch.empty(0), torch.tensor(1, device="meta"), Unreadable(),
    np.ma.array(1, mask=True),
]  # fmt: skip
"""None of these is exactly one integer, though Python or torch would convert many of them."""

NO_ROWS: list[Any] = [*NO_INTEGERS, -1, 2**63, -(2**63) - 1, 2**200, 10**5000]
"""None of these is an index or a count, either."""


def name_of(value: object) -> str:
    """Names a value in a test's id, equally in each process."""
    try:
        text = repr(value).partition(" at 0x")[0]
    except Exception:  # Unreadable, or too many digits
        text = ""
    return f"{type(value).__name__}-{text}"[:40].replace("\n", " ")
