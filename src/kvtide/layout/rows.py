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

    Row r of that layer is row `layer_rows[i] + r` of the buffer. `layer_rows` is int64 [layer].
    Rows that do not adjoin (`is_padded`) move one by one. Buffers of one `group` take the same
    rows of a request.
    """

    row_bytes: int
    layer_rows: NDArray[np.int64]
    group: int = 0
    is_padded: bool = False

    def part(self, first: int, stop: int) -> BufferRows:
        """The same buffer with these of its layers alone."""
        return BufferRows(self.row_bytes, self.layer_rows[first:stop], self.group, self.is_padded)

    def cut(self, pieces: int) -> BufferRows:
        """The same buffer with each row read as so many: row r as r * pieces and those after."""
        assert self.row_bytes % pieces == 0, "pieces are of one size"
        return BufferRows(
            self.row_bytes // pieces, self.layer_rows * pieces, self.group, self.is_padded
        )
