"""Keeps a model's matrices in the form in which the processor multiplies them fast.

For a product with a bfloat16 matrix oneDNN brings the matrix into an order of its own, in each call
again. In a step of few rows that takes longer than the product itself. Here it is done once.

A processor without instructions for bfloat16 takes seven times as long for such products as for
those of float32. It gets a float32 copy of each matrix. The result is as exact: products of two
bfloat16 numbers are exact in float32, in which both ways add them up.

The copies cost memory. So they are made only where that leaves enough of it. Where the matrices are
pages of a model's file, the system may drop those.

The self-check measures these products as it measures all others (`kvtide.serve.operations`).
"""

from __future__ import annotations

from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear

from kvtide.arena.budget import free_memory_bytes

_PACKET = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PRODUCT: Any = None if _PACKET is None else _PACKET.default
"""torch's operator; None where torch was built without oneDNN."""


def pack(weight: Tensor) -> Tensor:
    """A copy of the matrix [out, in] in oneDNN's order."""
    packed_weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed_weight


def packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of rows [..., in] with a packed matrix [out, in]."""
    assert _PRODUCT is not None, "nothing is packed without it"
    found: Tensor = _PRODUCT(rows, weight, bias, "none", [], "")
    return found


def is_packed_linear(function: Any) -> bool:
    """Whether an operator, as torch's dispatcher passes it, is the one of `packed_linear`."""
    return _PRODUCT is not None and function is _PRODUCT


@final
class PackedLinear(Linear):
    """A linear layer with the parameters of another, that multiplies a packed copy."""

    ITEM_BYTES: ClassVar[int] = 2

    def __init__(self, layer: Linear) -> None:
        Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.replaced = [layer]  # in a list, so that it isn't a part of the model
        self._packed = pack(layer.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # as the base class names it
        """The product of rows [..., in]."""
        return packed_linear(input, self._packed, self.bias)


@final
class WideLinear(Linear):
    """A linear layer with the parameters of another, that multiplies a float32 copy."""

    ITEM_BYTES: ClassVar[int] = 4

    def __init__(self, layer: Linear) -> None:
        Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.replaced = [layer]  # in a list, so that it isn't a part of the model
        self._wide = layer.weight.detach().float()
        self._wide_bias = None if layer.bias is None else layer.bias.detach().float()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 # as the base class names it
        """The product of rows [..., in], rounded to their dtype."""
        return linear(input.float(), self._wide, self._wide_bias).to(input.dtype)


_USERS: WeakKeyDictionary[Module, int] = WeakKeyDictionary()
"""For each model that is packed, how many want it so."""
_CHOICES: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()
"""For each model that was ever wanted, whether it is packed: what the self-check measured must hold
for all engines of a model."""


@final
class PackedWeights:
    """Keeps a model packed, until all who want it so have released it.

    Meanwhile the model's weights mustn't change, or move to another device.
    """

    def __init__(self, model: Module, spare_bytes: int | None = None) -> None:
        """Packs the model if that takes at most half of `spare_bytes`, the memory left for it.

        None stands for all that is free. The first who wants a model decides for all.
        """
        self._model: Module | None = model
        if model not in _CHOICES:
            spare_bytes = free_memory_bytes() if spare_bytes is None else spare_bytes
            _CHOICES[model] = packed_bytes_of(model) <= spare_bytes // 2
        self.is_packed = _CHOICES[model]
        users = _USERS.get(model, 0)
        if not users and self.is_packed:
            try:
                _replace_layers(model)
            except BaseException:  # without memory for all copies there are none
                _put_layers_back(model)
                raise
        _USERS[model] = users + 1

    def release(self) -> None:
        """Wants it no more. A second call does nothing."""
        if self._model is None:
            return
        _USERS[self._model] -= 1
        if not _USERS[self._model]:
            _put_layers_back(self._model)
        self._model = None

    def __enter__(self) -> PackedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def packed_bytes_of(model: Module) -> int:
    """The memory that packing the model takes."""
    found = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and (form := _form_of(layer)) is not None:
            found += layer.weight.numel() * form.ITEM_BYTES
    return found


@torch.no_grad()
def _replace_layers(model: Module) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear) and (form := _form_of(layer)) is not None:
                setattr(parent, name, form(layer))


def _put_layers_back(model: Module) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PackedLinear | WideLinear):
                setattr(parent, name, layer.replaced[0])


def _form_of(layer: Linear) -> type[PackedLinear | WideLinear] | None:
    """What multiplies faster in place of a layer that does nothing else: a hook would be lost."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    if type(layer) is not Linear or any(hooks) or layer.weight.device.type != "cpu":
        return None
    return _form_for(layer.weight.dtype)


def _form_for(dtype: torch.dtype) -> type[PackedLinear | WideLinear] | None:
    """What multiplies matrices of that dtype faster on this processor, if anything."""
    if dtype is not torch.bfloat16 or _PRODUCT is None:
        return None
    return PackedLinear if _multiplies_bfloat16() else WideLinear


def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 that oneDNN uses."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
