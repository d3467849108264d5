"""Probes of the self-check: one operation each, with numbers that show how it was computed.

Where exact sums are zero, what is computed is rounding: another order of additions then shows in
every row, where ordinary numbers would hide it behind the rounding to bfloat16 in all but a few.
Where a function has a fast way and another one for the last few numbers, only numbers for which
the two differ can show which one was taken, so those are looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvtide.serve.attention import Workspace, attend, plan_attention
from kvtide.serve.batch import Segment
from kvtide.serve.operations import Product, SingleOperation

_SEED = 20240517
_TRIED_NUMBERS = 1 << 16
# Products of keys and queries this large leave roundings of about 1 where their sum is zero.
_LARGE = 2.0**11


class Probe(Protocol):
    """An operation of the model on any number of rows that are all alike: their places differ."""

    name: str
    """What it is, for people."""

    def outcome(self, count: int) -> Tensor | None:
        """What comes of each of ``count`` rows, as bytes, or None where a row's place matters."""


class ProductProbe:
    """A product with a weight, of numbers whose exact sums are all zero."""

    name = "a product with a weight"

    def __init__(
        self, product: Product, dtype: torch.dtype, device: torch.device, max_rows: int
    ) -> None:
        out, width = product.out_features, product.in_features
        generator = torch.Generator().manual_seed(_SEED)
        order = torch.randperm(width, generator=generator)
        odd = (0, width % 2)
        # A vocabulary's rows repeat: what counts is the shape, and random numbers take time.
        distinct = _numbers(min(out, 1024), width // 2, generator)
        weight = pad(torch.cat([distinct, -distinct], 1), odd)[:, order].to(dtype)
        weight = weight.repeat(-(-out // len(weight)), 1)[:out].contiguous()
        row = pad(_numbers(1, width // 2, generator).repeat(1, 2), odd)[:, order]
        self.weight = weight.to(device)
        self.inputs = row.repeat(max_rows, 1).to(dtype).to(device)
        self._zeros = self.weight.new_zeros(out)
        self._has_bias = product.has_bias
        self._turned = self.weight.T.contiguous() if product.is_turned else None

    def outcome(self, count: int) -> Tensor | None:
        """The first row, if all are like it."""
        rows = self.inputs[:count]
        if self._turned is not None:
            return _first_of_equal(torch.addmm(self._zeros, rows, self._turned))
        bias = self._zeros if self._has_bias else None
        return _first_of_equal(linear(rows, self.weight, bias))


class SingleProbe:
    """An operation on one tensor, of numbers that show which of its ways was taken."""

    def __init__(self, operation: SingleOperation, device: torch.device) -> None:
        self.name = operation.name
        self._operation = operation
        numbers, self.may_differ = _showing_numbers(operation, device)
        size = operation.row_size
        self.row = numbers.repeat(-(-size // len(numbers)))[:size]

    def outcome(self, count: int) -> Tensor | None:
        """The first row, if all are like it."""
        return _first_of_equal(self._operation.run(self.row.expand(count, -1)))


@dataclass(frozen=True)
class AttentionSizes:
    """What a model's attention is like, in any of its layers."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


class AttentionProbe:
    """A query each of requests that are all alike, their context ``length`` when it is padded.

    A request's place in the bucket says which thread computes it, and where its numbers lie.
    With ``of_scores`` the products of queries and keys cancel, else the sums of values do.
    """

    def __init__(
        self, sizes: AttentionSizes, device: torch.device, length: int, *, of_scores: bool
    ) -> None:
        self.name = f"attention over {length} tokens"
        self._sizes, self._device = sizes, device
        self._workspace = Workspace()
        self._slots = torch.arange(length - 3)
        numbers = _scores_that_cancel if of_scores else _values_that_cancel
        query, keys, values = numbers(sizes, length)
        self.query = query.to(sizes.dtype).to(device)
        self.keys = keys.to(sizes.dtype).to(device)
        self.values = values.to(sizes.dtype).to(device)

    def outcome(self, count: int) -> Tensor | None:
        """The first request's numbers, if all are like it."""
        segments = [Segment(row, 1, self._slots) for row in range(count)]
        plan = plan_attention(segments, count, self._sizes.dtype).to(self._device)
        query = self.query.expand(count, -1, -1).contiguous()
        scale = self._sizes.head_dim**-0.5
        found = attend(plan, query, self.keys, self.values, scale, self._workspace)
        return _first_of_equal(found.reshape(count, -1))


def _first_of_equal(rows: Tensor) -> Tensor | None:
    """The first of ``rows``, as bytes, or None if one of them differs from it in a bit.

    NaN isn't equal to itself, but its bytes are.
    """
    data = rows.contiguous().view(torch.uint8)
    return data[:1] if torch.equal(data, data[:1].expand_as(data)) else None


def _numbers(count: int, width: int, generator: torch.Generator, spread: int = 3) -> Tensor:
    """Of unlike sizes, so that each order of additions rounds in its own way."""
    exponents = torch.randint(-spread, spread + 1, (count, width), generator=generator)
    return torch.randn(count, width, generator=generator) * torch.exp2(exponents)


def _scores_that_cancel(sizes: AttentionSizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, head, dim], keys and values [slot, kv_head, dim]: each score is zero if exact."""
    generator = torch.Generator().manual_seed(_SEED)
    half, odd = sizes.head_dim // 2, (0, sizes.head_dim % 2)
    order = torch.randperm(sizes.head_dim, generator=generator)
    query = _numbers(sizes.heads, half, generator).repeat(1, 2) * _LARGE
    keys = _numbers(length * sizes.kv_heads, half, generator) * _LARGE
    keys = pad(torch.cat([keys, -keys], 1), odd)[:, order].view(length, sizes.kv_heads, -1)
    values = torch.randn(length, sizes.kv_heads, sizes.v_head_dim, generator=generator)
    return pad(query, odd)[None, :, order], keys, values


def _values_that_cancel(sizes: AttentionSizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same shapes: keys come in equal pairs, and the values of a pair add to zero."""
    generator = torch.Generator().manual_seed(_SEED)
    query = torch.randn(1, sizes.heads, sizes.head_dim, generator=generator)
    slots = (length, sizes.kv_heads)
    # The last slots are padding, and one has no partner.
    pairs = (length - 3) // 2
    order = torch.cat(
        [torch.randperm(2 * pairs, generator=generator), torch.arange(2 * pairs, length)]
    )
    keys = torch.randn(pairs, sizes.kv_heads * sizes.head_dim, generator=generator).repeat(2, 1)
    # Values are added as they are. Of few powers of two, float32 holds sums of bfloat16 exactly.
    half = _numbers(pairs, sizes.kv_heads * sizes.v_head_dim, generator, spread=12)
    alone = (0, 0, 0, length - 2 * pairs)
    values = pad(torch.cat([half, -half]), alone)[order]
    return query, pad(keys, alone)[order].view(*slots, -1), values.view(*slots, -1)


def _showing_numbers(operation: SingleOperation, device: torch.device) -> tuple[Tensor, bool]:
    """Numbers for which the operation's two ways differ, and whether it may have two ways.

    Looked for among all numbers of 16 bits, or many of 32. An operation that isn't number by number
    gets random numbers, and may have two ways: of the largest ones a norm would make NaN.
    """
    generator = torch.Generator().manual_seed(_SEED)
    random = 4 * torch.randn(_TRIED_NUMBERS, generator=generator)
    numbers = random = random.to(operation.dtype).to(device)
    if operation.dtype.itemsize == 2:
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(operation.dtype)
        numbers = every[every.isfinite()].to(device)
    if any(isinstance(one, Tensor) for one in (*operation.others, *operation.named.values())):
        return random, True
    call = operation.function
    try:
        quick = call(numbers, *operation.others, **operation.named)
    except (IndexError, RuntimeError):  # it names an axis that a line of numbers doesn't have
        return random, True
    if quick.shape != numbers.shape:
        return random, True
    # Torch's quick way is for numbers that lie side by side.
    apart = numbers.repeat_interleave(2)[::2]
    slow = call(apart, *operation.others, **operation.named)
    differs = (quick != slow) & ~(quick.isnan() & slow.isnan())
    found = numbers[differs]
    return (found, True) if len(found) else (numbers, False)
