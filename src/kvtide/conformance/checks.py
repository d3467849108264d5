"""Checks that every pool must pass: functions of a PoolUnderTest that raise AssertionError.

The classes of the kit call them. The test of a pool may call them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvtide.conformance import refusals
from kvtide.conformance.pool_under_test import PoolUnderTest
from kvtide.conformance.reference import (
    Image,
    restored,
    rows_of_plane,
    snapshot_bytes,
)
from kvtide.conformance.trips import (
    INDICES,
    ORDERS,
    Trip,
    boundary_counts,
    counts_of,
    make_trip,
)
from kvtide.conformance.ways import (
    CHUNK_ROWS,
    MakeWay,
    TideWay,
    block_sizes,
    filled_and_saved,
    go,
    load_and_compare,
    refused,
    same,
    some_tokens,
    started,
    tokens_per_row,
    ways_of,
)
from kvtide.errors import LayoutError


def check_round_trips(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """Round trips are exact at all boundaries of chunks, for several block sizes and all orders."""
    make_way = make_way or partial(TideWay, subject)
    for size, block_bytes in block_sizes(subject).items():
        way = make_way(block_bytes)
        counts = counts_of(subject, CHUNK_ROWS)
        if size != "some rows":
            counts = (
                [0, 2 * tokens_per_row(subject) + 1] if size == "less than a row" else counts[-1:]
            )
        for number, count in enumerate(counts):
            order = ORDERS[number % len(ORDERS)]
            index = [*INDICES][number % len(INDICES)]
            trip = make_trip(subject, count, number, order)
            note = f"{count} tokens, {order} slots as {index}, chunks of {size}"
            go(way, trip, subject, index=index, seed=3 * number, note=note)


def check_boundaries(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """The most useful round trips, for when there is little time; every order is tried once."""
    make_way = make_way or partial(TideWay, subject)
    sizes = block_sizes(subject)
    way = make_way(sizes["some rows"])
    for number, count in enumerate(boundary_counts(subject, CHUNK_ROWS)):
        order, index = ORDERS[number], [*INDICES][-1 - number]
        trip = make_trip(subject, count, number, order)
        note = f"{count} tokens, {order} slots as {index}"
        go(way, trip, subject, index=index, seed=3 * number, note=note)
    if "less than a row" in sizes:
        trip = make_trip(subject, 2 * tokens_per_row(subject) - 1, 9)
        go(make_way(sizes["less than a row"]), trip, subject, note="chunks of less than a row")


def check_orders(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """Round trips are exact for every order of slots (`ORDERS`)."""
    make_way = make_way or partial(TideWay, subject)
    for number, order in enumerate(ORDERS):
        way = make_way(block_sizes(subject)["some rows"])
        trip = make_trip(subject, some_tokens(subject), number, order)
        go(way, trip, subject, seed=number, note=f"{order} slots")


def check_indices(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """Round trips are exact for every form of slots (`INDICES`)."""
    way = (make_way or partial(TideWay, subject))(block_sizes(subject)["some rows"])
    for number, index in enumerate(INDICES):
        trip = make_trip(subject, some_tokens(subject), number)
        go(way, trip, subject, index=index, seed=number, note=f"slots as {index}")


def check_planes(subject: PoolUnderTest) -> None:
    """`pool.plane` views the right bytes, and refuses other layers and other planes.

    Layers count from the stage's first.
    """
    image = subject.fill(5)
    for name, layer in subject.parts:
        plane = subject.pool.plane(name, layer)
        found = np.frombuffer(_tensor_bytes(plane), np.uint8).reshape(len(plane), -1)
        expected = image[name, layer][:, : found.shape[1]]
        same({(name, layer): expected}, {(name, layer): found}, "pool.plane")
    for declared in subject.geometry.planes:
        count = declared.layer_count
        for layer in {-1, count, count + subject.geometry.first_layer}:
            with refused(LayoutError, f"layer {layer} of plane {declared.name!r}"):
                subject.pool.plane(declared.name, layer)
    with refused(LayoutError, "a plane that isn't there"):
        subject.pool.plane("none", 0)


def check_snapshot_bytes(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """A snapshot has the bytes that its format demands, so any source fits any target.

    What the pool's own way saves has a format of its own, and comes back in chunks of any size.
    """
    sizes = block_sizes(subject)
    del sizes["some rows"]
    for size, block_bytes in sizes.items():
        count = some_tokens(subject) if size == "all rows" else 2 * tokens_per_row(subject)
        trip = make_trip(subject, count, 3)
        lengths = [*_chunk_bytes(subject, trip, block_bytes)]
        with filled_and_saved(TideWay(subject, block_bytes), trip, subject, 3) as (image, snapshot):
            expected = snapshot_bytes(subject.geometry, image, trip.source)
            blocks = zip(snapshot.lease.blocks, lengths, strict=True)
            found = b"".join(bytes(block.bytes_view(length)) for block, length in blocks)
        pairs = enumerate(zip(expected, found, strict=False))
        place = next((byte for byte, pair in pairs if len({*pair}) > 1), None)
        assert expected == found, f"chunks of {size}: the snapshot differs from byte {place} on"
        if make_way is not None:
            go(make_way(block_bytes), trip, subject, note=f"chunks of {size}")


def check_fences(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """A move waits for all earlier work of the device, and all later work waits for it.

    It reads slots and maps at the call. Two moves at a time don't disturb each other.
    """
    for way in ways_of(subject, block_sizes(subject)["some rows"], make_way):
        _check_fences(subject, way)


def _check_fences(subject: PoolUnderTest, way: Any) -> None:
    counts = (some_tokens(subject), 1)
    trips = [make_trip(subject, count, seed) for seed, count in enumerate(counts)]
    images: list[Image] = []
    snapshots: list[Any] = []
    waits: list[Callable[[], Any]] = []
    for number, trip in enumerate(trips):
        snapshots += [wait() for wait in waits]
        subject.set_maps(trip.source.maps)
        # The device may write these bytes later; the save must wait for that.
        images.append(subject.fill(10 + number))
        index = np.array(trip.source.slots, np.int64)
        waits = [started(way, "save", index, trip.source.request)]
        index[:] = index[::-1].copy()
        subject.set_maps({name: np.full_like(ids, 1) for name, ids in trip.source.maps.items()})
    twice = started(way, "save", trips[1].target.slots[:0], trips[1].source.request)
    snapshots += [wait() for wait in waits]
    way.drop(twice())
    expected = subject.fill(20)
    try:
        for trip, image in zip(trips, images, strict=True):
            subject.set_maps(trip.target.maps)
            index = np.array(trip.target.slots, np.int64)
            wait = started(way, "load", snapshots[0], index, trip.target.request)
            index[:] = 0
            subject.set_maps({name: np.full_like(ids, 1) for name, ids in trip.target.maps.items()})
            way.drop(snapshots.pop(0))  # waits for the load
            expected = restored(subject.geometry, image, trip.source, expected, trip.target)
            wait()
            same(expected, subject.image(), "moves under way")
    finally:
        for snapshot in snapshots:
            way.drop(snapshot)


def check_snapshot_owns(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """A snapshot is a copy: whatever happens to its slots, it can be restored, even twice."""
    for way in ways_of(subject, block_sizes(subject)["some rows"], make_way):
        trip = make_trip(subject, some_tokens(subject), 6)
        with filled_and_saved(way, trip, subject, 6) as saved:
            for seed in (60, 61):
                load_and_compare(way, trip, subject, saved, seed, f"restore of seed {seed}")


def _chunk_bytes(subject: PoolUnderTest, trip: Trip, block_bytes: int) -> Iterator[int]:
    """The bytes of each chunk if a group of planes is one chunk, or each row is split."""
    for rules in dict.fromkeys(plane.rules for plane in subject.geometry.planes):
        planes = [plane for plane in subject.geometry.planes if plane.rules == rules]
        rows = len(rows_of_plane(planes[0], trip.source))
        if not rows:
            continue
        if block_bytes >= rows * sum(plane.row_bytes * plane.layer_count for plane in planes):
            yield rows * sum(plane.row_bytes * plane.layer_count for plane in planes)
            continue
        for plane in planes:
            part_count = next(
                n for n in range(1, plane.row_bytes + 1)
                if plane.row_bytes % n == 0 and plane.row_bytes // n <= block_bytes
            )  # fmt: skip
            part_bytes = plane.row_bytes // part_count
            fitting = 1 << ((block_bytes // part_bytes).bit_length() - 1)
            for _ in range(plane.layer_count):
                left = rows * part_count
                while left:
                    yield min(left, fitting) * part_bytes
                    left -= min(left, fitting)


def _tensor_bytes(rows: Any) -> bytes:
    import torch

    host = rows.cpu().contiguous()
    found: bytes = host.view(-1).view(torch.uint8).numpy().tobytes()
    return found


POOL_CHECKS: tuple[Callable[[PoolUnderTest], None], ...] = (
    check_planes,
    check_round_trips,
    check_orders,
    check_indices,
    check_snapshot_bytes,
    check_snapshot_owns,
    refusals.check_refused_slots,
    refusals.check_failed_restores,
    check_fences,
)
"""All checks of a pool that kvtide moves."""
