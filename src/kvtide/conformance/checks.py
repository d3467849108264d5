"""Checks that every pool must pass: functions of a PoolUnderTest that raise AssertionError.

The classes of the kit call them. The test of a pool may call them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvtide.conformance.pool_under_test import PoolUnderTest
from kvtide.conformance.reference import (
    Image,
    Place,
    map_holes,
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
    TideWay,
    block_sizes,
    go,
    make_tide,
    refused,
    same,
    some_tokens,
    tokens_per_row,
)
from kvtide.errors import KvtideError, LayoutError, SlotError, SnapshotDamaged, SnapshotMiss
from kvtide.snapshot import Snapshot
from kvtide.ticket import Ticket


def check_round_trips(subject: PoolUnderTest, make_way: Callable[[int], Any] | None = None) -> None:
    """Round trips are exact at all boundaries of chunks, for several block sizes and all orders."""
    make_way = make_way or (lambda block_bytes: TideWay(subject, block_bytes))
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


def check_boundaries(subject: PoolUnderTest, make_way: Callable[[int], Any] | None = None) -> None:
    """The most useful round trips, for when there is little time; every order is tried once."""
    make_way = make_way or (lambda block_bytes: TideWay(subject, block_bytes))
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


def check_orders(subject: PoolUnderTest) -> None:
    """Round trips are exact for every order of slots (`ORDERS`)."""
    for number, order in enumerate(ORDERS):
        way = TideWay(subject, block_sizes(subject)["some rows"])
        trip = make_trip(subject, some_tokens(subject), number, order)
        go(way, trip, subject, seed=number, note=f"{order} slots")


def check_indices(subject: PoolUnderTest, make_way: Callable[[int], Any] | None = None) -> None:
    """Round trips are exact for every form of slots (`INDICES`)."""
    way = (make_way or (lambda size: TideWay(subject, size)))(block_sizes(subject)["some rows"])
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


def check_snapshot_bytes(subject: PoolUnderTest) -> None:
    """A snapshot has the bytes that its format demands, so any source fits any target."""
    sizes = block_sizes(subject)
    del sizes["some rows"]
    for size, block_bytes in sizes.items():
        count = some_tokens(subject) if size == "all rows" else 2 * tokens_per_row(subject)
        trip = make_trip(subject, count, 3)
        subject.set_maps(trip.source.maps)
        image = subject.fill(3)
        way = TideWay(subject, block_bytes)
        snapshot = way.save(trip.source.slots, trip.source.request)
        expected = snapshot_bytes(subject.geometry, image, trip.source)
        found = b"".join(
            bytes(block.bytes_view(length))
            for block, length in zip(
                snapshot.lease.blocks, _chunk_bytes(subject, trip, block_bytes), strict=True
            )
        )
        way.drop(snapshot)
        pairs = enumerate(zip(expected, found, strict=False))
        place = next((byte for byte, pair in pairs if len({*pair}) > 1), None)
        assert expected == found, f"chunks of {size}: the snapshot differs from byte {place} on"


def check_refused_slots(subject: PoolUnderTest) -> None:
    """Invalid slots raise SlotError and change nothing."""
    trip = make_trip(subject, some_tokens(subject), 2)
    subject.set_maps(trip.source.maps)
    way = TideWay(subject, block_sizes(subject)["some rows"])
    image = subject.fill(2)
    snapshot = way.save(trip.source.slots, trip.source.request)
    good, total = list(trip.source.slots), subject.pool.slot_count
    padding = range(subject.pool.padding_slots)
    bad: list[Any] = [
        [*good[:-1], -1],
        [*good[:-1], total],
        [*good[:-1], 1 << 40],
        [*good[:-1], good[0]],
        [float(slot) for slot in good],
        [good],
        [slot % 2 == 0 for slot in good],
        "slots",
        *([*good[:-1], slot] for slot in {*padding[:1], *padding[-1:]}),
    ]
    for slots in bad:
        with refused(SlotError, f"to save {slots}"):
            way.save(slots, trip.source.request)
        with refused(SlotError, f"to restore to {slots}"):
            way.load(snapshot, slots, trip.source.request)
    _check_refused_requests(subject, way, snapshot, trip)
    same(image, subject.image(), "slots were refused, and the pool has changed")
    way.drop(snapshot)


def _check_refused_requests(
    subject: PoolUnderTest, way: TideWay, saved: Snapshot, trip: Trip
) -> None:
    if not subject.request_count:
        return
    for request in (None, -1, subject.request_count):
        with refused(SlotError, f"to save of request {request}"):
            way.save(trip.source.slots, request)
        with refused(SlotError, f"to restore to request {request}"):
            way.load(saved, trip.source.slots, request)


def check_failed_restores(subject: PoolUnderTest) -> None:
    """A restore that is impossible raises an error and changes nothing.

    The snapshot is damaged or discarded, or it has another geometry, key, length or window.
    """
    trip = make_trip(subject, some_tokens(subject), 4)
    subject.set_maps(trip.source.maps)
    subject.fill(4)
    tide = make_tide(subject, block_sizes(subject)["some rows"])
    source, target = trip.source, trip.target
    snapshot = tide.offload(source.slots, key="own", request=source.request)
    subject.set_maps(target.maps)
    before = subject.fill(40)

    def refuse(
        error: type[KvtideError],
        why: str,
        slots: Sequence[int],
        key: str = "own",
        keep_extra_rows: bool = True,
    ) -> None:
        with refused(error, why):
            tide.restore(
                snapshot, slots, key=key, request=target.request, keep_extra_rows=keep_extra_rows
            )
        same(before, subject.image(), f"{why}: refused, and yet the pool has changed")

    refuse(SnapshotMiss, "another key", target.slots, "other")
    refuse(SnapshotMiss, "fewer slots", target.slots[:-1])
    for number, block in enumerate(snapshot.lease.blocks):
        block.bytes_view(1)[0] ^= 0x10
        refuse(SnapshotDamaged, f"a flipped bit in chunk {number}", target.slots)
        block.bytes_view(1)[0] ^= 0x10
    seal = snapshot.seal
    other = replace(subject.geometry, rank=subject.geometry.rank + 1)
    snapshot.seal = replace(seal, geometry=other.canonical)
    refuse(SnapshotMiss, "another geometry", target.slots)
    snapshot.seal = seal
    _check_other_window(subject, refuse, target)
    if _has_extra_rows(subject, trip):
        why = "rows of tokens that the snapshot has none for"
        refuse(SnapshotMiss, why, target.slots, keep_extra_rows=False)
    tide.restore(snapshot, target.slots, key="own", request=target.request, keep_extra_rows=True)
    tide.discard(snapshot)
    before = subject.image()
    refuse(SnapshotMiss, "a discarded snapshot", target.slots)


def _check_other_window(
    subject: PoolUnderTest,
    refuse: Callable[[type[KvtideError], str, Sequence[int]], None],
    target: Place,
) -> None:
    """A token that has a row in the snapshot and none at the target can't be restored."""
    for name, hole in map_holes(subject.geometry).items():
        kept = target.maps[name]
        if not (kept > hole).any():
            continue
        subject.set_maps({name: np.full_like(kept, hole)})
        refuse(SnapshotMiss, f"nothing in the window {name!r}", target.slots)
        subject.set_maps({name: kept})


def _has_extra_rows(subject: PoolUnderTest, trip: Trip) -> bool:
    """Whether a token has a row at the target and none at the source."""
    return any(
        rows_of_plane(plane, trip.target).keys() - rows_of_plane(plane, trip.source).keys()
        for plane in subject.geometry.planes
    )


def check_fences(subject: PoolUnderTest) -> None:
    """A move waits for all earlier work of the device, and all later work waits for it.

    It reads slots and maps at the call. Two moves at a time don't disturb each other.
    """
    tide = make_tide(subject, block_sizes(subject)["some rows"])
    trips = [
        make_trip(subject, count, seed) for seed, count in enumerate((some_tokens(subject), 1))
    ]
    images: list[Image] = []
    snapshots: list[Snapshot] = []
    tickets: list[Ticket[Snapshot]] = []
    for number, trip in enumerate(trips):
        for ticket in tickets:
            snapshots.append(ticket.wait())
        subject.set_maps(trip.source.maps)
        # The device may write these bytes later; the offload must wait for that.
        images.append(subject.fill(10 + number))
        index = np.array(trip.source.slots, np.int64)
        tickets = [tide.start_offload(index, key="kit", request=trip.source.request)]
        index[:] = index[::-1].copy()
        subject.set_maps({name: np.full_like(ids, 1) for name, ids in trip.source.maps.items()})
    twice = tide.start_offload(
        trips[1].target.slots[:0], key="kit", request=trips[1].source.request
    )
    snapshots += [ticket.wait() for ticket in tickets]
    tide.discard(twice.wait())
    expected = subject.fill(20)
    for number, trip in enumerate(trips):
        subject.set_maps(trip.target.maps)
        index = np.array(trip.target.slots, np.int64)
        restoring = tide.start_restore(
            snapshots[number], index, key="kit", request=trip.target.request, keep_extra_rows=True
        )
        index[:] = 0
        subject.set_maps({name: np.full_like(ids, 1) for name, ids in trip.target.maps.items()})
        tide.discard(snapshots[number])  # waits for the restore
        expected = restored(subject.geometry, images[number], trip.source, expected, trip.target)
        restoring.wait()
        same(expected, subject.image(), "moves under way")
    assert tide.arena.used_bytes == 0, f"{tide.arena.used_bytes} bytes are still in use"


def check_miss(source: PoolUnderTest, target: PoolUnderTest) -> None:
    """The target refuses a snapshot of the source and doesn't change."""
    block_bytes = block_sizes(source)["some rows"]
    trip = make_trip(source, some_tokens(source), 8)
    source.set_maps(trip.source.maps)
    source.fill(8)
    way = TideWay(source, block_bytes, target)
    snapshot = way.save(trip.source.slots, trip.source.request)
    before = target.fill(80)
    for slots in (trip.source.slots, range(len(trip.source.slots))):
        with refused(SnapshotMiss, "a snapshot of another geometry"):
            way.load(snapshot, slots, trip.source.request)
    same(before, target.image(), "a snapshot was refused, and yet the pool has changed")
    way.drop(snapshot)


def check_snapshot_owns(subject: PoolUnderTest) -> None:
    """A snapshot is a copy: whatever happens to its slots, it can be restored, even twice."""
    way = TideWay(subject, block_sizes(subject)["some rows"])
    trip = make_trip(subject, some_tokens(subject), 6)
    subject.set_maps(trip.source.maps)
    saved = subject.fill(6)
    snapshot = way.save(trip.source.slots, trip.source.request)
    subject.set_maps(trip.target.maps)
    for seed in (60, 61):
        before = subject.fill(seed)
        way.load(snapshot, trip.target.slots, trip.target.request)
        expected = restored(subject.geometry, saved, trip.source, before, trip.target)
        same(expected, subject.image(), f"restore of seed {seed}")
    way.drop(snapshot)


def _chunk_bytes(subject: PoolUnderTest, trip: Trip, block_bytes: int) -> Iterator[int]:
    """The bytes of each chunk where every group is one, or every layer's row is several."""
    for rules in dict.fromkeys(plane.rules for plane in subject.geometry.planes):
        planes = [plane for plane in subject.geometry.planes if plane.rules == rules]
        rows = len(rows_of_plane(planes[0], trip.source))
        if not rows:
            continue
        if block_bytes >= rows * sum(plane.row_bytes * plane.layer_count for plane in planes):
            yield rows * sum(plane.row_bytes * plane.layer_count for plane in planes)
            continue
        for plane in planes:
            pieces = next(
                n for n in range(1, plane.row_bytes + 1)
                if plane.row_bytes % n == 0 and plane.row_bytes // n <= block_bytes
            )  # fmt: skip
            piece_bytes = plane.row_bytes // pieces
            fitting = 1 << ((block_bytes // piece_bytes).bit_length() - 1)
            for _ in range(plane.layer_count):
                left = rows * pieces
                while left:
                    yield min(left, fitting) * piece_bytes
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
    check_refused_slots,
    check_failed_restores,
    check_fences,
)
"""All checks of a pool that kvtide moves."""
