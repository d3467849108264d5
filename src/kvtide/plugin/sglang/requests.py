"""The rows that a request of SGLang's has besides those of its tokens, by their kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvtide.errors import SlotError
from kvtide.integers import integer_of, shown
from kvtide.plugin.description import Description
from kvtide.plugin.reader import Table

READS: Table = {"ReqKvInfo": ("req_pool_idx", "mamba_pool_idx?")}


def rows_of_request(
    req: Any, description: Description, kinds: Collection[str]
) -> Mapping[str, int]:
    """Of the `kinds` that the described pool has: `request` is its row in SGLang's tables.

    Raises SlotError for a recurrent state that the description doesn't know of, and for row 0,
    which is SGLang's padding.
    """
    held = {"request": req.kv.req_pool_idx, "mamba": req.kv.mamba_pool_idx}
    # A state's row is a tensor, which may lie on the device.
    rows = {
        kind: row.cpu() if hasattr(row, "cpu") else row
        for kind, row in held.items()
        if row is not None
    }
    if "mamba" in rows and "mamba" not in description.request_kinds:
        raise SlotError(
            f"request has a recurrent state, in row {shown(rows['mamba'])}, and kvtide knows of "
            f"none beside {description.name}: it would be lost"
        )
    own = {kind: row for kind, row in rows.items() if kind in kinds}
    empty = [kind for kind, row in own.items() if integer_of(row) == 0]
    if empty:
        raise SlotError(f"request has no row of the kinds {empty}: row 0 is SGLang's padding")
    return own
