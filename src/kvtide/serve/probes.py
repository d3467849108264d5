"""Probes of the self-check: each runs one operation on numbers that reveal how it was computed.

A probe of sums uses numbers whose exact sum is zero. The computed sum is then only rounding, so
another order of additions shows in every row. With ordinary numbers the rounding to bfloat16 would
hide it in most rows. A function of single numbers may have fast code, and other code for the last
few numbers. Its probe searches for numbers on which the two differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvtide.serve.attention import Workspace, attend, plan_attention
from kvtide.serve.batch import RowCounts, Segment
from kvtide.serve.operations import Product, SingleOperation
from kvtide.serve.packed import pack, packed_linear
from kvtide.serve.query_blocks import QUERY_ROWS

_SEED = 20240517
_TRIED_NUMBERS = 1 << 16
# Products of keys and queries this large leave roundings of about 1 where their sum is zero.
_LARGE = 2.0**11


class Probe(Protocol):
    """An operation of the model, to run on any number of equal rows."""

    name: str
    """A description for people."""

    def outcome(self, count: int) -> Tensor | None:
        """The result of each of `count` equal rows, as bytes; None if the results differ."""


class ProductProbe:
    """A product with a weight; all its exact sums are zero."""

    name = "a product with a weight"

    def __init__(self, product: Product, device: torch.device, max_rows: int) -> None:
        out, width, dtype = product.out_features, product.in_features, product.dtype
        generator = torch.Generator().manual_seed(_SEED)
        order = torch.randperm(width, generator=generator)
        odd = (0, width % 2)
        # The rows of a vocabulary repeat: random numbers take time, and only the shape matters.
        distinct = _numbers(min(out, 1024), width // 2, generator)
        weight = pad(torch.cat([distinct, -distinct], 1), odd)[:, order].to(dtype)
        weight = weight.repeat(-(-out // len(weight)), 1)[:out].contiguous()
        row = pad(_numbers(1, width // 2, generator).repeat(1, 2), odd)[:, order]
        self.weight = weight.to(device)
        self.inputs = row.repeat(max_rows, 1).to(dtype).to(device)
        self._zeros = self.weight.new_zeros(out)
        self._has_bias = product.has_bias
        self._turned = self.weight.T.contiguous() if product.is_turned else None
        self._packed = pack(self.weight) if product.is_packed else None

    def outcome(self, count: int) -> Tensor | None:
        """See Probe."""
        rows = self.inputs[:count]
        if self._turned is not None:
            return _first_of_equal(torch.addmm(self._zeros, rows, self._turned))
        bias = self._zeros if self._has_bias else None
        if self._packed is not None:
            return _first_of_equal(packed_linear(rows, self._packed, bias))
        return _first_of_equal(linear(rows, self.weight, bias))


class SingleProbe:
    """An operation on one tensor, with numbers that show by which code it was computed."""

    def __init__(self, operation: SingleOperation, device: torch.device) -> None:
        self.name = operation.name
        self._operation = operation
        numbers, self.may_differ = _showing_numbers(operation, device)
        size = operation.row_size
        self.row = numbers.repeat(-(-size // len(numbers)))[:size]

    def outcome(self, count: int) -> Tensor | None:
        """See Probe."""
        return _first_of_equal(self._operation.run(self.row.expand(count, -1)))


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of a model's attention, the same in all layers."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


class AttentionProbe:
    """Attention of equal requests, one query each, over contexts padded to `length` tokens.

    A request's place in the bucket decides which thread computes it, and its place in memory. With
    `of_scores` the products of queries and keys sum to zero, otherwise the values do.
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
        self.query = _finite(query, sizes.dtype).to(device)
        self.keys = _finite(keys, sizes.dtype).to(device)
        self.values = _finite(values, sizes.dtype).to(device)

    def outcome(self, count: int) -> Tensor | None:
        """See Probe; a row is a request."""
        segments = [Segment(row, 1, self._slots) for row in range(count)]
        plan = plan_attention(segments, count, self._sizes.dtype).to(self._device)
        query = self.query.expand(count, -1, -1).contiguous()
        scale = self._sizes.head_dim**-0.5
        found = attend(plan, query, self.keys, self.values, scale, self._workspace)
        return _first_of_equal(found.reshape(count, -1))


class CutProbe:
    """Attention of the last block of positions of a prompt of `length` tokens, in some steps.

    With `of_scores` the products of queries and keys sum to zero, otherwise the values do.
    """

    def __init__(
        self, sizes: AttentionSizes, device: torch.device, length: int, *, of_scores: bool
    ) -> None:
        self.name = f"attention over {length} tokens"
        self._sizes, self._device = sizes, device
        self._workspace = Workspace()
        self._slots = torch.arange(length)
        generator = torch.Generator().manual_seed(_SEED)
        query = torch.randn(QUERY_ROWS, sizes.heads, sizes.head_dim, generator=generator)
        if of_scores:
            # The rows are one query, by different powers of two.
            scales = torch.exp2(-torch.arange(QUERY_ROWS) % 5)
            query, keys, values = _scores_that_cancel(sizes, length)
            query = query * scales[:, None, None]
        else:
            # The block itself adds nothing, so that the sum of what comes before stays zero.
            _, keys, values = _values_that_cancel(sizes, length - QUERY_ROWS + 3)
            keys, values = (pad(rows[:-3], (0, 0, 0, 0, 0, QUERY_ROWS)) for rows in (keys, values))
        self.query = _finite(query, sizes.dtype).to(device)
        self.keys = _finite(keys, sizes.dtype).to(device)
        self.values = _finite(values, sizes.dtype).to(device)

    def outcome(self, count: int) -> Tensor | None:
        """The block's result, as bytes, if each step computes `count` queries in one call."""
        return self.in_steps(range(count, QUERY_ROWS, count), RowCounts((count,)))

    def in_steps(self, starts: Iterable[int], query_rows: RowCounts) -> Tensor:
        """The block's result, as bytes, if steps begin at these queries, and at the first one."""
        before = len(self._slots) - QUERY_ROWS
        scale = self._sizes.head_dim**-0.5
        found = []
        for first, last in pairwise((0, *starts, QUERY_ROWS)):
            segment = Segment(0, last - first, self._slots[: before + last], of_prompt=True)
            plan = plan_attention([segment], last - first, self._sizes.dtype, query_rows=query_rows)
            query, plan = self.query[first:last], plan.to(self._device)
            found.append(attend(plan, query, self.keys, self.values, scale, self._workspace))
        return torch.cat(found).reshape(1, -1).contiguous().view(torch.uint8)


def _first_of_equal(rows: Tensor) -> Tensor | None:
    """The first of `rows`, as bytes, or None if another row differs in a bit.

    Compares bytes, because NaN isn't equal to itself.
    """
    data = rows.contiguous().view(torch.uint8)
    return data[:1] if torch.equal(data, data[:1].expand_as(data)) else None


def _numbers(count: int, width: int, generator: torch.Generator, spread: int = 3) -> Tensor:
    """Random numbers of different magnitudes: another order of additions rounds differently."""
    exponents = torch.randint(-spread, spread + 1, (count, width), generator=generator)
    return torch.randn(count, width, generator=generator) * torch.exp2(exponents)


def _finite(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in another dtype, by a power of two that makes all of them finite there.

    Infinite ones would give NaN, which hides the order of additions. Only float16 is that small.
    """
    excess = float(numbers.abs().max()) / torch.finfo(dtype).max
    return (numbers * 2.0 ** -max(0, ceil(log2(excess)))).to(dtype)


def _scores_that_cancel(sizes: AttentionSizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [1, head, dim], keys and values [slot, kv_head, dim]; each exact score is zero."""
    generator = torch.Generator().manual_seed(_SEED)
    half, odd = sizes.head_dim // 2, (0, sizes.head_dim % 2)
    order = torch.randperm(sizes.head_dim, generator=generator)
    query = _numbers(sizes.heads, half, generator).repeat(1, 2) * _LARGE
    keys = _numbers(length * sizes.kv_heads, half, generator) * _LARGE
    keys = pad(torch.cat([keys, -keys], 1), odd)[:, order].view(length, sizes.kv_heads, -1)
    values = torch.randn(length, sizes.kv_heads, sizes.v_head_dim, generator=generator)
    return pad(query, odd)[None, :, order], keys, values


def _values_that_cancel(sizes: AttentionSizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs of the same shapes; keys come in equal pairs whose values sum to zero."""
    generator = torch.Generator().manual_seed(_SEED)
    query = torch.randn(1, sizes.heads, sizes.head_dim, generator=generator)
    slots = (length, sizes.kv_heads)
    # The last three slots are padding, and one slot may have no partner.
    pairs = (length - 3) // 2
    order = torch.cat(
        [torch.randperm(2 * pairs, generator=generator), torch.arange(2 * pairs, length)]
    )
    keys = torch.randn(pairs, sizes.kv_heads * sizes.head_dim, generator=generator).repeat(2, 1)
    # Values are summed unscaled. float32 holds sums of bfloat16 numbers exactly if their exponents
    # are close, so these spread more.
    half = _numbers(pairs, sizes.kv_heads * sizes.v_head_dim, generator, spread=12)
    alone = (0, 0, 0, length - 2 * pairs)
    values = pad(torch.cat([half, -half]), alone)[order]
    return query, pad(keys, alone)[order].view(*slots, -1), values.view(*slots, -1)


def _showing_numbers(operation: SingleOperation, device: torch.device) -> tuple[Tensor, bool]:
    """Numbers on which the operation's two codes differ, and whether two codes may exist.

    Searches all numbers of 16 bits, or many of 32. An operation that combines numbers, such as a
    norm, may have two codes; it gets random numbers, since the largest ones would give NaN.
    """
    generator = torch.Generator().manual_seed(_SEED)
    random = 4 * torch.randn(_TRIED_NUMBERS, generator=generator)
    numbers = random = random.to(operation.dtype).to(device)
    if operation.dtype.itemsize == 2:
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(operation.dtype)
        numbers = every[every.isfinite()].to(device)
    further = (*operation.others, *operation.named.values())
    if any(isinstance(argument, Tensor) for argument in further):
        return random, True
    call = operation.function
    try:
        quick = call(numbers, *operation.others, **operation.named)
    except (IndexError, RuntimeError):  # it needs an axis that these numbers don't have
        return random, True
    if quick.shape != numbers.shape:
        return random, True
    # torch's fast code is for numbers that are side by side in memory.
    apart = numbers.repeat_interleave(2)[::2]
    slow = call(apart, *operation.others, **operation.named)
    differs = (quick != slow) & ~(quick.isnan() & slow.isnan())
    found = numbers[differs]
    return (found, True) if len(found) else (numbers, False)
