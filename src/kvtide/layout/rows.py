"""BufferRows: how one buffer of a pool divides into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True, eq=False)
class BufferRows:
    """A buffer as rows of `row_bytes`: its i-th layer begins at row `layer_rows[i]`.

    Row r of that layer is row `layer_rows[i] + r` of the buffer; `layer_rows` is int64 [layer].
    `plane` is the number of the geometry's plane that it holds. Rows that have gaps behind them
    (`is_padded`) move one by one.
    """

    row_bytes: int
    layer_rows: NDArray[np.int64]
    plane: int = 0
    is_padded: bool = False
