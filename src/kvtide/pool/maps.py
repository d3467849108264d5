"""What an engine knows of a request beside its slots: maps from ids to ids, rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import numpy as np
import torch

from kvtide.errors import KvtideError, LayoutError, SlotError, first_line
from kvtide.integers import checked_integer, integers_of, shown
from kvtide.layout import Ids, OfRequest, RequestRows

Map = Callable[[Ids], Ids]
"""From ids to ids, int64 [id]."""


@final
class EngineMap:
    """A map of the engine's by its name: integers [slot], or a function from ids to as many ids.

    It is read anew at each call, which blocks where it lies on a device.
    """

    def __init__(self, name: str, held: Any) -> None:
        """Raises LayoutError for what can't be such a map."""
        if not callable(held) and not _are_integers(held):
            raise LayoutError(
                f"map {name!r} is {shown(held)}; it must be integers [slot], or a function from "
                "ids to ids"
            )
        self.name = name
        self._held = held

    def __call__(self, ids: Ids) -> Ids:
        """The ids (int64 [id]) that these lead to; SlotError if the map hasn't one for each."""
        try:
            found = integers_of(self._read(ids), f"map {self.name!r}: row", "slot")
        except KvtideError:
            raise
        except Exception as error:  # the engine's own
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


def own_rows(request: RequestRows, kinds: Collection[str]) -> dict[str, Map]:
    """A request's rows as maps, each by its kind. A row that isn't given is for its rule to miss.

    Raises SlotError for what is no row, or a row of a kind that the layout, which has rows of
    these `kinds`, hasn't: nothing would be saved of it.
    """
    if request is None:
        return {}
    given = request if isinstance(request, Mapping) else {OfRequest().kind: request}
    if not given.keys() <= set(kinds):
        known = f"rows of the kinds {sorted(kinds)}" if kinds else "no rows of requests"
        raise SlotError(
            f"request={shown(request)}: this layout has {known}; give one integer for each of them"
        )
    rows = {
        kind: checked_integer(row, f"request: its row of {kind!r}") for kind, row in given.items()
    }
    return {kind: _one_row(row) for kind, row in rows.items()}


def _one_row(row: int) -> Map:
    """The map of all ids to a request's row."""
    return lambda _: np.array([row], np.int64)


def _are_integers(held: Any) -> bool:
    """Whether it is integers [slot], wherever they lie."""
    if isinstance(held, torch.Tensor):
        dtype = held.dtype
        is_other = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
        return held.dim() == 1 and not is_other
    try:
        integers_of(held, "row")
    except SlotError:
        return False
    return True
