"""Which operations a pass of the model consists of, as far as one of them may depend on its rows.

A pass is watched, not read: whatever the model's code calls, torch's dispatcher sees. Kept are the
products with a weight, and the operations on a single tensor of floating-point numbers, such as an
activation, a cosine or a norm: their numbers may depend on the row count, since torch computes the
last few numbers of a tensor, and of each thread's share of it, in another way than the rest. What
IEEE 754 defines for each number by itself, such as adding two tensors, doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# They copy, convert, or do what IEEE 754 defines for each number.
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "neg", "abs", "relu"),
        *("to", "_to_copy", "clone", "contiguous", "reshape"),
    )
)


@dataclass(frozen=True)
class Product:
    """A product with a weight [out, in], and a bias [out] if it has one."""

    out_features: int
    in_features: int
    has_bias: bool
    is_turned: bool = False
    """Whether the weight lies as [in, out], as GPT-2's do."""

    @classmethod
    def of(cls, function: Any, arguments: tuple[Any, ...]) -> Product | None:
        """The product that this call is, if it is one."""
        if function is torch.ops.aten.linear.default:
            out, width = arguments[1].shape
            return cls(out, width, has_bias=len(arguments) > 2 and arguments[2] is not None)
        if function is torch.ops.aten.addmm.default:
            width, out = arguments[2].shape
            return cls(out, width, has_bias=True, is_turned=True)
        return None


@dataclass(frozen=True, eq=False)
class SingleOperation:
    """An operation on one tensor that has a row for each row of the pass."""

    function: Any
    """As torch's dispatcher knows it."""
    shape: tuple[int | None, ...]
    """Sizes of its input; None is the number of rows."""
    order: tuple[int, ...]
    """The axes of its input, outermost in memory first."""
    dtype: torch.dtype
    others: tuple[Any, ...]
    """Its further arguments, weights among them, but no other tensor of rows."""
    named: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as `silu`."""
        return str(self.function.overloadpacket.__name__)

    @property
    def row_size(self) -> int:
        """How many numbers of the input a row has."""
        return torch.Size(size for size in self.shape if size is not None).numel()

    def run(self, rows: Tensor) -> Tensor:
        """What comes of ``rows`` [row, row_size], laid out as in the model: [row, any]."""
        axis = self.shape.index(None)
        shape = [len(rows) if size is None else size for size in self.shape]
        in_memory = rows.new_empty([shape[one] for one in self.order])
        given = in_memory.permute([self.order.index(one) for one in range(len(shape))])
        given.movedim(axis, 0).copy_(rows.view(len(rows), *shape[:axis], *shape[axis + 1 :]))
        found: Tensor = self.function(given, *self.others, **self.named)
        return found.movedim(axis, 0).reshape(len(rows), -1)


class PassWatch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Collects the operations of a pass of ``row_count`` rows, a number that no other axis has."""

    def __init__(self, row_count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row_count = row_count
        self._seen: set[Any] = set()
        self.products: list[Product] = []
        self.singles: list[SingleOperation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets the operation happen, and keeps it if it is of a kind that may matter."""
        named = kwargs or {}
        outcome = func(*args, **named)
        product = Product.of(func, args)
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
            or any(count in _sizes_in(one) for one in values)
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
    """A number of rows that is no size of the model's own, so that rows are known by it."""
    sizes = {size for weight in model.parameters() for size in weight.shape}
    return next(count for count in (61, 59, 53, 47, 43, 41, 37, 31, 29, 23) if count not in sizes)


def _sizes_in(argument: Any) -> tuple[Any, ...]:
    """The sizes that an argument has or names."""
    if isinstance(argument, Tensor):
        return tuple(argument.shape)
    return tuple(argument) if isinstance(argument, list | tuple) else (argument,)


def _describe(value: Any) -> str:
    """An argument as part of a key: of a weight its shape."""
    return str(value.shape) if isinstance(value, Tensor) else repr(value)
