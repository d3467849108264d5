"""A trial pass: does each layer of a model use kvtide's cache and attention function?

Each layer must give its keys and values to the cache once, and call the attention function once,
with the same heads. Keys and values that a layer keeps elsewhere would never reach the pool.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from kvtide.errors import UsageError


class Trial:
    """Notes what each layer calls in one pass; `reason_to_refuse` judges it at the end."""

    def __init__(self, *, limit: int | None) -> None:
        """`limit` is the model's longest context in tokens, or None if it states none."""
        self._limit = limit
        self._window: int | None = None
        self._cached: list[int] = []
        self._attended: list[int] = []
        self._states: tuple[Tensor, ...] = ()

    def see_cached(self, layer: int, *states: Tensor) -> None:
        """A layer gave its keys and values, each [1, kv_head, row, dim], to the cache."""
        self._cached.append(layer)
        self._states = states

    def see_attended(self, module: Module, layer: int, *states: Tensor, window: int | None) -> None:
        """A layer attends to these keys and values, which must be its cached ones.

        Each cached head serves the same number of consecutive query heads. Raises UsageError for a
        model that repeats its heads in another order.
        """
        self._attended.append(layer)
        if window is not None and (self._limit is None or window < self._limit):
            self._window = window
        for cached, used in zip(self._states, states, strict=False):
            times = max(1, used.shape[1] // cached.shape[1])
            repeated = cached.repeat_interleave(times, 1)
            # Another check refuses a model with NaN in its weights.
            if not repeated.nan_to_num().equal(used.nan_to_num()):
                raise UsageError(
                    f"the model's {type(module).__name__} isn't served: between its cache and its "
                    f"attention it makes {used.shape[1]} heads of {cached.shape[1]} KV heads in an "
                    "unknown order; choose a model with grouped heads"
                )

    def reason_to_refuse(self, layers: list[int]) -> str | None:
        """None if each of `layers` used the cache once and attended once, in order."""
        if self._cached == layers and not self._attended:
            return (
                "its layers don't call the attention function that transformers lets others "
                "replace, so they would never read the pool"
            )
        if self._cached != layers or self._attended != layers:
            calls = ", ".join(
                f"the {what} {len(seen)} times in {len(set(seen))} layers"
                for what, seen in (("cache", self._cached), ("attention", self._attended))
            )
            return f"each of its {len(layers)} layers must use both once, but they use {calls}"
        if self._window is not None:
            return f"it has a sliding window ({self._window} of {self._limit} positions)"
        return None
