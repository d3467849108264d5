"""Collects the operations of a model's pass whose results may depend on the number of rows.

torch's dispatcher sees each operation, so no model's code must be read. Two kinds may depend on the
row count. A product with a weight chooses its kernel by it. An operation on one tensor of floating
point numbers (an activation, a cosine, a norm) computes the last few numbers of a tensor, and of
each thread's share, by other code than the rest. Operations that IEEE 754 defines number by number,
such as the sum of two tensors, don't depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.serve.packed import is_packed_linear

# These copy, convert, or compute what IEEE 754 defines number by number.
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "neg", "abs", "relu"),
        *("to", "_to_copy", "clone", "contiguous", "reshape"),
    )
)


@dataclass(frozen=True)
class Product:
    """A product with a weight [out, in], plus a bias [out] if it has one."""

    out_features: int
    in_features: int
    has_bias: bool
    dtype: torch.dtype
    """The dtype of rows and weight, which may be wider than the model's."""
    is_turned: bool = False
    """Whether the weight is [in, out] in memory, as in GPT-2."""
    is_packed: bool = False
    """Whether the weight is in oneDNN's order (`kvtide.serve.packed`)."""

    @classmethod
    def from_call(cls, function: Any, arguments: tuple[Any, ...]) -> Product | None:
        """The product that a call computes, or None if it computes something else."""
        is_packed = is_packed_linear(function)
        if function is torch.ops.aten.linear.default or is_packed:
            out, width = arguments[1].shape
            has_bias = len(arguments) > 2 and arguments[2] is not None
            return cls(out, width, has_bias, arguments[1].dtype, is_packed=is_packed)
        if function is torch.ops.aten.addmm.default:
            width, out = arguments[2].shape
            return cls(out, width, True, arguments[2].dtype, is_turned=True)
        return None


@dataclass(frozen=True, eq=False)
class SingleOperation:
    """An operation on one tensor that has a row for each row of the pass."""

    function: Any
    """The operator, as torch's dispatcher passes it."""
    shape: tuple[int | None, ...]
    """The sizes of its input; None stands for the number of rows."""
    order: tuple[int, ...]
    """The axes of its input, the outermost in memory first."""
    dtype: torch.dtype
    others: tuple[Any, ...]
    """Its further arguments; some may be weights, none has a row for each row of the pass."""
    named: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name, such as `silu`."""
        return str(self.function.overloadpacket.__name__)

    @property
    def row_size(self) -> int:
        """How many numbers a row of the input has."""
        return torch.Size(size for size in self.shape if size is not None).numel()

    def run(self, rows: Tensor) -> Tensor:
        """Its result [row, any] for `rows` [row, row_size], in the model's memory layout."""
        row_axis = self.shape.index(None)
        shape = [len(rows) if size is None else size for size in self.shape]
        in_memory = rows.new_empty([shape[axis] for axis in self.order])
        given = in_memory.permute([self.order.index(axis) for axis in range(len(shape))])
        row_shape = (*shape[:row_axis], *shape[row_axis + 1 :])
        given.movedim(row_axis, 0).copy_(rows.view(len(rows), *row_shape))
        found: Tensor = self.function(given, *self.others, **self.named)
        return found.movedim(row_axis, 0).reshape(len(rows), -1)


class PassWatch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Collects the operations of a pass of `row_count` rows; no other axis has that size."""

    def __init__(self, row_count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row_count = row_count
        self._seen: set[Any] = set()
        self.products: list[Product] = []
        self.singles: list[SingleOperation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation, and notes it if its result may depend on the row count."""
        named = kwargs or {}
        outcome = func(*args, **named)
        product = Product.from_call(func, args)
        if product is not None:
            if self._is_new(product):
                self.products.append(product)
        elif isinstance(outcome, Tensor) and args and isinstance(args[0], Tensor):
            self._watch_single(func, args[0], args[1:], named, outcome)
        return outcome

    def _watch_single(
        self, func: Any, given: Tensor, others: tuple[Any, ...], named: Any, outcome: Tensor
    ) -> None:
        count = self._row_count
        values = (*others, *named.values())
        if (
            func.is_view
            or func._schema.name in _EXACT
            or not (given.is_floating_point() and outcome.is_floating_point())
            or [*given.shape].count(count) != 1
            or outcome.dim() != given.dim()
            or outcome.shape[given.shape.index(count)] != count
            or any(count in _sizes_in(value) for value in values)
        ):
            return
        strides = given.stride()
        order = sorted(range(given.dim()), key=lambda axis: -strides[axis])
        shape = tuple(None if size == count else size for size in given.shape)
        key = (func, shape, tuple(order), given.dtype, *map(_describe, values))
        if self._is_new(key):
            self.singles.append(
                SingleOperation(func, shape, tuple(order), given.dtype, others, named)
            )

    def _is_new(self, key: Any) -> bool:
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def trial_row_count(model: torch.nn.Module) -> int:
    """A row count that no size of the model equals, so that it identifies the rows' axis."""
    sizes = {size for weight in model.parameters() for size in weight.shape}
    return next(count for count in (61, 59, 53, 47, 43, 41, 37, 31, 29, 23) if count not in sizes)


def _sizes_in(argument: Any) -> tuple[Any, ...]:
    """The sizes of a tensor argument, or the values of another argument."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape)
    return tuple(argument) if isinstance(argument, list | tuple) else (argument,)


def _describe(value: Any) -> str:
    """An argument as part of a key: a tensor by its shape."""
    return str(value.shape) if isinstance(value, Tensor) else repr(value)
