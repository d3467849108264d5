"""What an engine knows of a request beside its slots: maps from ids to ids, and its own rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import numpy as np
import torch

from kvtide.errors import KvtideError, LayoutError, SlotError, first_line
from kvtide.integers import checked_integer, integers_of, shown
from kvtide.layout import Ids, OfRequest, RequestRows

Map = Callable[[Ids], Ids]
"""A function from ids to ids, int64 [id]."""


@final
class EngineMap:
    """An engine's map: integers [slot], or a function from ids to as many ids.

    Each call reads it anew. The call blocks where the map lies on a device.
    """

    def __init__(self, name: str, held: Any) -> None:
        """Raises LayoutError for an invalid map."""
        if not callable(held) and not _are_integers(held):
            raise LayoutError(
                f"map {name!r} is {shown(held)}; it must be integers [slot], or a function from "
                "ids to ids"
            )
        self.name = name
        self._held = held

    def __call__(self, ids: Ids) -> Ids:
        """Maps ids (int64 [id]) to as many ids. Raises SlotError if the map has another number."""
        try:
            found = integers_of(self._read(ids), f"map {self.name!r}: row", "slot")
        except KvtideError:
            raise
        except Exception as error:  # an engine's function may raise anything
            raise SlotError(
                f"map {self.name!r} of {ids.size} slots: {first_line(error)}"
            ) from error
        if found.size != ids.size:
            raise SlotError(f"map {self.name!r}: {found.size} rows for {ids.size} slots")
        return found

    def _read(self, ids: Ids) -> Any:
        held = self._held
        if callable(held):
            return held(ids.copy())
        outside = (ids < 0) | (ids >= len(held))
        if outside.any():
            raise SlotError(
                f"slot {ids[outside][0]} isn't in the map {self.name!r} of {len(held)} slots"
            )
        if isinstance(held, torch.Tensor):
            return held[torch.from_numpy(ids).to(held.device)]
        return np.asarray(held)[ids]


def request_maps(request: RequestRows, kinds: Collection[str]) -> dict[str, Map]:
    """A request's rows as maps by kind. If one is missing, the rule that needs it says so.

    Raises SlotError for a value that isn't an integer, and for a row of a kind that isn't among
    `kinds`, the kinds of the layout: nothing of such a row would be saved.
    """
    if request is None:
        return {}
    given = request if isinstance(request, Mapping) else {OfRequest().kind: request}
    if not given.keys() <= set(kinds):
        known = f"rows of the kinds {sorted(kinds)}" if kinds else "no rows of requests"
        raise SlotError(
            f"request={shown(request)}: this layout has {known}; give one integer for each kind"
        )
    rows = {
        kind: checked_integer(row, f"request: its row of {kind!r}") for kind, row in given.items()
    }
    return {kind: _map_to(row) for kind, row in rows.items()}


def _map_to(row: int) -> Map:
    """The map of all ids to a request's row."""
    return lambda _: np.array([row], np.int64)


def _are_integers(held: Any) -> bool:
    """Whether the map is integers [slot], on the host or on a device."""
    if isinstance(held, torch.Tensor):
        dtype = held.dtype
        is_other = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
        return held.dim() == 1 and not is_other
    try:
        integers_of(held, "row")
    except SlotError:
        return False
    return True
