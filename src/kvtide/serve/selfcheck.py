"""The start-up self-check of exact mode: which row counts give a row the same bits?

A matrix product's kernel, and with it the order in which a row's products are added, is chosen
by the library underneath (oneDNN, MKL), by the number of rows, the weight's shape, the dtype,
the instruction set and the number of threads. None of that is promised, so it is measured, at
each start, on this machine, with the thread count in force:

1. For each distinct shape of the model's Linear layers, every row count up to ``max_rows``,
   with numbers that cancel: the exact sums are zero, what remains is rounding, and so another
   order of additions shows in every row, where ordinary numbers would hide it behind the
   rounding to bfloat16 in all but a few. Neighbouring counts must agree on the rows they share,
   and a row must come out the same at another place. That splits the counts into ranges.
2. The range that costs least is then tried with whole passes of the model itself over a small
   pool: subsets of the rows, in another order and from other slots, against all of them.

A range may be a single count: then every pass has exactly that many rows; in the worst case one,
each request by itself. Where not even that repeats its bits, exact mode can't be had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvtide.device import Device
from kvtide.pool import Pool
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.batch import PackedBatch, RowRange, Segment
from kvtide.serve.paged import PagedModel
from kvtide.serve.supported import geometry_of

# A weight of more numbers than this (a vocabulary) is measured at a few counts of a range only.
_LARGE_WEIGHT = 8_000_000
_SAMPLES = 8
_PAGE_SIZE = 16
_SHARED_SLOTS = 144
_SEED = 20240517


@dataclass(frozen=True)
class RowCheck:
    """What `find_rows` found."""

    rows: RowRange | None
    """The row counts to run passes at, or None where no count is safe."""
    detail: str
    """One line for people: what was measured."""
    seconds: float


@dataclass(frozen=True)
class _Probe:
    """A Linear layer's shape with numbers whose exact products are all zero."""

    weight: Tensor
    """[out, in]."""
    inputs: Tensor
    """[max_rows, in]."""

    def on(self, device: torch.device) -> _Probe:
        return _Probe(self.weight.to(device), self.inputs.to(device))

    def run(self, count: int) -> Tensor:
        return linear(self.inputs[:count], self.weight)

    def same_elsewhere(self, count: int, outputs: Tensor) -> bool:
        """Whether each row gives ``outputs`` at another place among the ``count`` rows, too."""
        shift = count // 2
        moved = linear(self.inputs[:count].roll(shift, 0), self.weight)
        return torch.equal(moved.roll(-shift, 0), outputs)


@torch.inference_mode()
def find_rows(model: PreTrainedModel, device: Device, *, max_rows: int = 64) -> RowCheck:
    """Measures the safe row counts of passes up to ``max_rows`` on ``device``, now.

    The model is on it already. Blocks, for about a second with a small model; allocates a small
    pool for the time being and leaves the model as it was. Raises UsageError for a model that
    isn't served.
    """
    start = time.perf_counter()
    probes = [
        _probe(*shape, model.dtype, max_rows).on(device.torch_device)
        for shape in _linear_shapes(model)
    ]
    small = [probe for probe in probes if probe.weight.numel() <= _LARGE_WEIGHT]
    large = [probe for probe in probes if probe.weight.numel() > _LARGE_WEIGHT]
    ranges = _agreeing_ranges(small, max_rows)
    tried: list[str] = []
    for rows in _candidates(ranges):
        counts = _spread(rows, _SAMPLES)
        if all(_agree(probe, counts) for probe in large) and _passes_agree(model, device, rows):
            detail = f"passes of {rows.least} to {rows.most} rows agree bit for bit"
            return RowCheck(rows, detail, time.perf_counter() - start)
        tried.append(f"{rows.least}..{rows.most}")
    detail = f"no row count up to {max_rows} is safe here (tried {', '.join(tried) or 'none'})"
    return RowCheck(None, detail, time.perf_counter() - start)


def _linear_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """The distinct (out, in) of the model's Linear layers."""
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    return sorted({(one.out_features, one.in_features) for one in layers})


def _probe(out: int, width: int, dtype: torch.dtype, max_rows: int) -> _Probe:
    """Inputs repeat one half of numbers, weights hold the other with both signs, shuffled."""
    generator = torch.Generator().manual_seed(_SEED)
    half = width // 2

    def numbers(count: int) -> Tensor:
        exponents = torch.randint(-3, 4, (count, half), generator=generator)
        return torch.randn(count, half, generator=generator) * torch.exp2(exponents)

    order = torch.randperm(width, generator=generator)
    odd = (0, width - 2 * half)
    # A vocabulary's rows repeat: what counts is the shape, and random numbers take time.
    distinct = numbers(min(out, 1024))
    weight = torch.cat([distinct, -distinct], 1)
    weight = torch.nn.functional.pad(weight, odd)[:, order].to(dtype)
    weight = weight.repeat(-(-out // len(weight)), 1)[:out].contiguous()
    inputs = torch.nn.functional.pad(numbers(max_rows).repeat(1, 2), odd)[:, order]
    return _Probe(weight, inputs.to(dtype).contiguous())


def _agreeing_ranges(probes: list[_Probe], max_rows: int) -> list[RowRange]:
    """The longest ranges of row counts in which all probes' rows agree."""
    breaks = {1, max_rows + 1}
    for probe in probes:
        before = probe.run(1)
        for count in range(2, max_rows + 1):
            outputs = probe.run(count)
            if not torch.equal(outputs[:-1], before):
                breaks.add(count)
            if not probe.same_elsewhere(count, outputs):
                breaks |= {count, count + 1}
            before = outputs
    ordered = sorted(breaks)
    ranges = [RowRange(least, after - 1) for least, after in pairwise(ordered)]
    return [rows for rows in ranges if _places_agree(probes, rows)]


def _places_agree(probes: list[_Probe], rows: RowRange) -> bool:
    """False for the single counts at which a row's place matters."""
    if rows.least != rows.most:
        return True
    return all(probe.same_elsewhere(rows.least, probe.run(rows.least)) for probe in probes)


def _agree(probe: _Probe, counts: list[int]) -> bool:
    """Whether the probe's rows agree at all of these counts and at other places."""
    whole = probe.run(counts[-1])
    return all(
        torch.equal(probe.run(count), whole[:count]) for count in counts[:-1]
    ) and probe.same_elsewhere(counts[-1], whole)


def _candidates(ranges: list[RowRange]) -> list[RowRange]:
    """What to try, best first: the two cheapest ranges, then single counts.

    Functions of single numbers, such as an activation, may treat the last few of a pass
    differently from the rest; at round row counts there is no such remainder.
    """
    best = sorted(ranges, key=_cost)[:2]
    singles = [
        RowRange(count, count)
        for count in (32, 16, 1)
        if any(rows.least <= count <= rows.most for rows in ranges)
    ]
    return best + [rows for rows in singles if rows not in best]


def _cost(rows: RowRange) -> float:
    """Relative time of steps of 1 to 64 requests, where 64 more rows double a pass's time."""
    total = 0.0
    for requests in (1, 2, 4, 8, 16, 32, 64):
        passes = -(-requests // rows.most)
        total += passes + max(requests, passes * rows.least) / 64
    return total


def _spread(rows: RowRange, count: int) -> list[int]:
    """At most ``count`` row counts over the range, ascending, with both ends."""
    width = rows.most - rows.least
    return sorted({rows.least + width * step // (count - 1) for step in range(count)})


def _passes_agree(model: PreTrainedModel, device: Device, rows: RowRange) -> bool:
    """Whether whole passes give each request the same logits whoever else is in them."""
    geometry = geometry_of(model.config, str(model.dtype).removeprefix("torch."), _PAGE_SIZE)
    slot_count = 2 * (_SHARED_SLOTS + rows.most)
    pool = Pool.create(geometry, device, page_count=-(-slot_count // _PAGE_SIZE))
    half = slot_count // 2
    generator = torch.Generator().manual_seed(_SEED)
    for plane in geometry.planes:
        for layer in range(plane.layer_count):
            typed = pool.plane(plane.name, layer)
            # Random numbers of the host, so that they are the same for every device.
            numbers = torch.randn(half, *typed.shape[1:], generator=generator).to(typed)
            typed[:half], typed[half:slot_count] = numbers, numbers
    paged = PagedModel(model, pool, exact=True, rows=rows)
    try:
        everyone = list(range(rows.most))
        whole = paged.forward(_requests(model, everyone, 0))
        for subset, base in _subsets(rows, half, generator):
            found = paged.forward(_requests(model, subset, base))
            if not torch.equal(found, whole[subset]):
                return False
    finally:
        paged.release()
    return True


def _subsets(
    rows: RowRange, half: int, generator: torch.Generator
) -> Iterator[tuple[list[int], int]]:
    """Who is in each trial pass, shuffled, and the slot from which their copy of the KV starts."""
    middle = min(rows.most, (rows.least + rows.most) // 2 | 1)
    for step, count in enumerate(sorted({1, middle, rows.most}), 1):
        yield torch.randperm(rows.most, generator=generator)[:count].tolist(), half * (step % 2)


def _requests(model: PreTrainedModel, members: list[int], base: int) -> PackedBatch:
    """One decoding query of each member; contexts share slots but for their last one."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    segments, token_ids, positions, out_slots = [], [], [], []
    for row, member in enumerate(members):
        context = 1 + member * 37 % _SHARED_SLOTS
        own = base + _SHARED_SLOTS + member
        shared = torch.arange(base, base + context - 1)
        segments.append(Segment(row, 1, torch.cat([shared, torch.tensor([own])])))
        token_ids.append(member * 7919 % vocabulary)
        positions.append(context - 1)
        out_slots.append(own)
    return PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(out_slots),
        tuple(segments),
        torch.arange(len(members)),
    )
