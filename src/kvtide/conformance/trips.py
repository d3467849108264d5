"""Trip: the place that a request is saved from, and the place that it is restored to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.conformance.pool_under_test import PoolUnderTest
from kvtide.conformance.reference import Place, map_holes, mapped_count, units_of
from kvtide.device import Device

Ids = NDArray[np.int64]

ORDERS = ("contiguous", "reversed", "scattered", "pages", "straddling")
"""The orders of a request's slots; slots that share a row stay side by side in each."""

INDICES: dict[str, Callable[[Ids, Device], Any]] = {
    "list": lambda ids, _: ids.tolist(),
    "numpy int64": lambda ids, _: ids,
    "numpy int32": lambda ids, _: ids.astype(np.int32),
    "torch int64, host": lambda ids, _: torch.from_numpy(ids),
    "torch int32, host": lambda ids, _: torch.from_numpy(ids).int(),
    "torch int64, device": lambda ids, device: torch.from_numpy(ids).to(device.torch_device),
    "torch int32, device": lambda ids, device: torch.from_numpy(ids).int().to(device.torch_device),
}
"""The forms in which engines give slots, by name: functions of int64 ids and a device."""


@final
@dataclass(frozen=True)
class Trip:
    """A request moves from `source` to `target`, in pools of the same geometry."""

    source: Place
    target: Place


def make_trip(
    source: PoolUnderTest,
    count: int,
    seed: int,
    order: str = "scattered",
    target: PoolUnderTest | None = None,
) -> Trip:
    """A trip of a request of `count` tokens from random slots of `source` to slots of `target`.

    The maps of windows are random, too: some tokens have left the window, more of them at the
    source. This writes to no pool and to no map.
    """
    target = target or source
    random = np.random.default_rng(seed)
    places = [
        _slots(source, count, random, order),
        _slots(target, count, random, order),
    ]
    maps = _maps(source, target, places, random)
    requests: list[int | None] = [None, None]
    if source.request_count:
        row = int(random.integers(source.request_count))
        requests = [row, (row + 1) % target.request_count]
    return Trip(
        Place(places[0].tolist(), requests[0], maps[0]),
        Place(places[1].tolist(), requests[1], maps[1]),
    )


def counts_of(subject: PoolUnderTest, chunk_rows: int) -> list[int]:
    """Token counts around the boundaries of chunks of `chunk_rows` rows.

    They are 0, 1, and the counts of one and two chunks with a token or a row more or less. If a row
    stands for several tokens, some counts fill a row in part.
    """
    unit = _tokens_per_row(subject)
    limit = subject.pool.slot_count - subject.pool.padding_slots
    wanted = {0, 1, unit - 1, unit + 1}
    for rows in (chunk_rows - 1, chunk_rows, chunk_rows + 1, 2 * chunk_rows, 2 * chunk_rows + 1):
        wanted |= {rows * unit}
    wanted |= {chunk_rows * unit - 1, chunk_rows * unit + 1, 2 * chunk_rows * unit - 1}
    return sorted(count for count in wanted if 0 <= count <= limit)


def boundary_counts(subject: PoolUnderTest, chunk_rows: int) -> Iterator[int]:
    """The most important counts of `counts_of`."""
    unit = _tokens_per_row(subject)
    yield from (chunk_rows * unit, 0, chunk_rows * unit + 1, 1, chunk_rows * unit - 1)


def _tokens_per_row(subject: PoolUnderTest) -> int:
    """The tokens per row of the plane of tokens where these are fewest."""
    most = [plane.tokens_per_row for plane in subject.geometry.planes if plane.tokens_per_row]
    return min(most, default=1)


def _slots(subject: PoolUnderTest, count: int, random: np.random.Generator, order: str) -> Ids:
    """Distinct slots in that order; slots that share a row stay side by side."""
    unit = units_of(subject.geometry).slots
    if unit == 1 and order == "pages":
        unit = subject.pool.page_size
    first_run = -(-subject.pool.padding_slots // unit)
    run_count, needed = subject.pool.slot_count // unit - first_run, -(-count // unit)
    assert needed <= run_count, f"{count} tokens don't fit into {run_count} runs of {unit} slots"
    if order in ("contiguous", "straddling"):
        first = int(random.integers(run_count - needed + 1))
        if order == "straddling":
            first = min(first | 1, run_count - needed)
        runs = np.arange(first, first + needed)
    elif order == "reversed":
        runs = np.arange(needed)[::-1] + int(random.integers(run_count - needed + 1))
    else:
        runs = random.permutation(run_count)[:needed]
    firsts = (first_run + runs[:, None]) * unit
    slots: Ids = (firsts + np.arange(unit)).reshape(-1)[:count].astype(np.int64)
    return slots


def _maps(
    source: PoolUnderTest, target: PoolUnderTest, places: list[Ids], random: np.random.Generator
) -> list[dict[str, Ids]]:
    """The engine's maps at the source and at the target, int64 [slot]; other tokens have holes.

    The target may have rows for more tokens than the source, never for fewer.
    """
    found: list[dict[str, Ids]] = [{}, {}]
    unit = units_of(source.geometry).mapped
    for name, hole in map_holes(source.geometry).items():
        unit_count = -(-places[0].size // unit)
        rooms = [mapped_count(s.geometry, name, s.row_counts) // unit for s in (source, target)]
        room = min(unit_count, min(rooms) - 1)
        kept = np.sort(random.permutation(unit_count)[-room:] if room else np.empty(0, np.int64))
        # A window may have holes. If rows are tokens, the target has rows for some of these.
        kept = np.delete(kept, len(kept) // 2) if len(kept) > 3 else kept
        saved = kept[len(kept) // 3 :]
        saved = np.delete(saved, len(saved) // 2) if unit == 1 and len(saved) > 3 else saved
        for side, (subject, tokens) in enumerate(((source, saved), (target, kept))):
            ids = np.full(subject.pool.slot_count, hole, np.int64)
            # Row 0 is padding, as in an engine, so a hole may be 0.
            rows = 1 + random.permutation(rooms[side] - 1)
            for row, number in zip(rows, tokens, strict=False):
                numbers = np.arange(number * unit, min((number + 1) * unit, places[side].size))
                ids[places[side][numbers]] = row * unit + numbers % unit
            found[side][name] = ids
    return found
