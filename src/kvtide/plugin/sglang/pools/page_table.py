"""Virtual slots: under SGLang's unified memory a table maps a request's slots to rows.

SGLang moves pages within the buffer, but hands out numbers that don't change. So the table is read
at each save and restore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from kvtide.errors import SlotError
from kvtide.layout import Ids
from kvtide.plugin.reader import Reader, Table

READS: Table = {
    "MultiEndedAllocator": ("virtual_to_physical", "pool_page_size", "num_virtual_ids"),
}


@final
@dataclass(frozen=True, slots=True)
class PageTable:
    """A map for a Mapped rule, from virtual slots to rows of a kind, which errors call `what`.

    `allocator` is SGLang's MultiEndedAllocator, which has the table, [page]. With `may_lack` a slot
    without a row, such as one that has left a window, maps to -1; otherwise it is a SlotError.
    """

    allocator: Any
    what: str
    may_lack: bool = False

    def __call__(self, ids: Ids) -> Ids:
        """The rows of virtual slots, int64 [slot]. Blocks."""
        reads = Reader(self.allocator, READS)
        table, size = reads["virtual_to_physical"], reads["pool_page_size"]
        pages = table[torch.from_numpy(ids // size).to(table.device)].cpu().numpy()
        lacking = pages <= 0  # page 0 is SGLang's padding
        if lacking.any() and not self.may_lack:
            raise SlotError(f"virtual slot {ids[lacking][0]} has no {self.what} row")
        return np.where(lacking, -1, pages * size + ids % size)

    @property
    def slot_count(self) -> int:
        """One more than the highest virtual slot."""
        reads = Reader(self.allocator, READS)
        return int(reads["num_virtual_ids"] * reads["pool_page_size"])
