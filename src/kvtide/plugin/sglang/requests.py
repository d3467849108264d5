"""SGLangRequests: tells a keeper the slots and the rows of SGLang's requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import torch

from kvtide.errors import SlotError
from kvtide.integers import integer_of, shown
from kvtide.plugin.description import Description
from kvtide.plugin.keeper import Requests
from kvtide.plugin.reader import Table
from kvtide.plugin.sglang.rules import LastTokens, window_of

READS: Table = {
    "ReqToTokenPool": ("req_to_token",),
    "DecodeReqToTokenPool": ("req_to_token",),
    "Req": ("rid", "kv", "seqlen"),
    "ReqKvInfo": ("req_pool_idx", "mamba_pool_idx?"),
}
"""Request pools are read by name, so another class is accepted if it has the table."""

STATE = "mamba"
"""The kind of row that has a request's recurrent state. Each step of the request changes it."""


@final
class SGLangRequests(Requests):
    """The requests of a scheduler. `request_pool`, SGLang's req_to_token_pool, has their slots.

    `kinds` are the kinds of rows that the described pool has on this rank. `is_ahead` says whether
    a request is part of a step whose result SGLang hasn't seen: see `unseen_results`.
    """

    def __init__(
        self,
        request_pool: Any,
        description: Description,
        kinds: Collection[str],
        is_ahead: Callable[[Any], bool],
    ) -> None:
        self._request_pool = request_pool
        self._description = description
        self._kinds = kinds
        self._is_ahead = is_ahead
        self._window = _window_of(description)

    def id_of(self, request: Any) -> str:
        """SGLang's `rid`."""
        rid: str = request.rid
        return rid

    def slots_of(self, request: Any) -> torch.Tensor:
        """The slots of the tokens with KV, [token]; in a model of windows only of the last ones.

        The first `seqlen - 1` tokens have KV; the last token has none yet.
        """
        table: torch.Tensor = self._request_pool.req_to_token
        token_count = request.seqlen - 1
        # If all layers have windows, the slots of earlier tokens belong to other requests now.
        first = 0 if self._window is None else self._window.first(token_count)
        return table[request.kv.req_pool_idx, first:token_count].cpu()

    def rows_of(self, request: Any) -> Mapping[str, int]:
        """See Requests. `request` is the row in SGLang's tables, `mamba` the row of the state.

        Raises SlotError for a recurrent state that isn't in the description, and for row 0, which
        is SGLang's padding.
        """
        held = {"request": request.kv.req_pool_idx, STATE: request.kv.mamba_pool_idx}
        # The row of a state is a tensor, which may be on the device.
        rows = {
            kind: row.cpu() if hasattr(row, "cpu") else row
            for kind, row in held.items()
            if row is not None
        }
        if STATE in rows and STATE not in self._description.request_kinds:
            raise SlotError(
                f"request has a recurrent state, in row {shown(rows[STATE])}, and kvtide knows of "
                f"none beside {self._description.name}: it would be lost"
            )
        moved = {kind: row for kind, row in rows.items() if kind in self._kinds}
        empty = [kind for kind, row in moved.items() if integer_of(row) == 0]
        if empty:
            raise SlotError(f"request has no row of the kinds {empty}: row 0 is SGLang's padding")
        return moved

    def is_ahead(self, request: Any) -> bool:
        """See Requests. Without a recurrent state a further step doesn't matter."""
        return STATE in self._kinds and self._is_ahead(request)


def _window_of(description: Description) -> LastTokens | None:
    """The window rule of the description, if all its parts have the same; otherwise None."""
    parts = [part for part in description.parts if any(tensor.numel() for tensor in part.tensors)]
    return window_of(part.rules for part in parts)
