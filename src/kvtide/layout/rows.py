"""BufferRows: how one buffer of a pool divides into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True)
class BufferRows:
    """A buffer as rows of `row_bytes`: its i-th layer begins at row `layer_rows[i]`.

    Slot s of that layer is row `layer_rows[i] + s`. `layer_rows` is int64 [layer].
    """

    row_bytes: int
    layer_rows: NDArray[np.int64]
