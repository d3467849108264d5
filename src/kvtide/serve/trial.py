"""What a pass that serves nobody shows of a model: whether it uses the cache and the attention.

Each layer is to hand its keys and values to the cache once and to attend once by the function that
kvtide put in place, over the same heads. What a layer does beside that would never reach a pool.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from kvtide.errors import UsageError


class Trial:
    """Notes who used what in one pass, for `reason_to_refuse` at its end."""

    def __init__(self, *, limit: int | None) -> None:
        """``limit`` is the model's longest context in tokens, if it says one."""
        self._limit = limit
        self._window: int | None = None
        self._cached: list[int] = []
        self._attended: list[int] = []
        self._states: tuple[Tensor, ...] = ()

    def see_cached(self, layer: int, *states: Tensor) -> None:
        """The layer handed over its keys and values, each [1, kv_head, row, dim]."""
        self._cached.append(layer)
        self._states = states

    def see_attended(self, module: Module, layer: int, *states: Tensor, window: int | None) -> None:
        """The layer attends to these keys and values; they are to be those that it cached.

        Queries look at the cached heads in equal groups, in order. Raises UsageError for a model
        that means another order.
        """
        self._attended.append(layer)
        if window is not None and (self._limit is None or window < self._limit):
            self._window = window
        for cached, used in zip(self._states, states, strict=False):
            group = max(1, used.shape[1] // cached.shape[1])
            repeated = cached.repeat_interleave(group, 1)
            # Of a model whose weights are NaN another check says so.
            if not repeated.nan_to_num().equal(used.nan_to_num()):
                raise UsageError(
                    f"the model's {type(module).__name__} isn't served: between its cache and its "
                    f"attention it makes {used.shape[1]} heads of {cached.shape[1]} KV heads in an "
                    "order of its own; choose a model with grouped heads"
                )

    def reason_to_refuse(self, layers: list[int]) -> str | None:
        """None if each of ``layers`` used the cache once and the attention once, in order."""
        if self._cached == layers and not self._attended:
            return (
                "its layers attend by code of their own, not by the function that transformers "
                "lets others replace, so they would never look into the pool"
            )
        if self._cached != layers or self._attended != layers:
            calls = ", ".join(
                f"the {what} {len(seen)} times in {len(set(seen))} layers"
                for what, seen in (("cache", self._cached), ("attention", self._attended))
            )
            return f"its {len(layers)} layers are to use each once, and use {calls}"
        if self._window is not None:
            return f"it has a sliding window ({self._window} of {self._limit} positions)"
        return None
