"""Checks of what a pool refuses: invalid slots, and snapshots that don't fit or are damaged.

Whatever is refused raises an error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvtide.conformance.pool_under_test import PoolUnderTest
from kvtide.conformance.reference import Place, map_holes, rows_of_plane
from kvtide.conformance.trips import Trip, make_trip
from kvtide.conformance.ways import (
    MakeWay,
    TideWay,
    block_sizes,
    filled_and_saved,
    load_and_compare,
    make_tide,
    refused,
    same,
    some_tokens,
    ways_of,
)
from kvtide.errors import KvtideError, SlotError, SnapshotDamaged, SnapshotMiss


def check_refused_slots(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """Invalid slots raise an error (SlotError, if kvtide moves them) and change nothing."""
    for way in ways_of(subject, block_sizes(subject)["some rows"], make_way):
        trip = make_trip(subject, some_tokens(subject), 2)
        requests = (None, -1, subject.request_count) if subject.request_count else ()
        with filled_and_saved(way, trip, subject, 2) as saved:
            image, snapshot = saved
            for slots in _invalid_slots(subject, trip):
                _check_refused(way, snapshot, slots, trip.source.request, f"{slots}")
            for request in requests:
                _check_refused(way, snapshot, trip.source.slots, request, f"request {request}")
            same(image, subject.image(), "slots were refused, and the pool has changed")
            load_and_compare(way, trip, subject, saved, 20, "restored after refusals")


def _check_refused(way: Any, saved: Any, slots: Any, request: int | None, what: str) -> None:
    error = SlotError if isinstance(way, TideWay) else Exception
    with refused(error, f"to save {what}"):
        way.save(slots, request)
    with refused(error, f"to restore to {what}"):
        way.load(saved, slots, request)


def _invalid_slots(subject: PoolUnderTest, trip: Trip) -> list[Any]:
    good, total = list(trip.source.slots), subject.pool.slot_count
    padding = range(subject.pool.padding_slots)
    return [
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


def check_failed_restores(subject: PoolUnderTest, make_way: MakeWay | None = None) -> None:
    """A restore that is impossible raises an error and changes nothing.

    The snapshot is damaged or discarded, or it has another geometry, key, length or window. What
    the pool's own way saved has another length.
    """
    _check_failed_restores(subject)
    if make_way is not None:
        way = make_way(block_sizes(subject)["some rows"])
        trip = make_trip(subject, some_tokens(subject), 4)
        with filled_and_saved(way, trip, subject, 4) as saved:
            subject.set_maps(trip.target.maps)
            before = subject.fill(40)
            with refused(Exception, "to restore to fewer slots"):
                way.load(saved[1], trip.target.slots[:-1], trip.target.request)
            same(before, subject.image(), "refused, and yet the pool has changed")
            load_and_compare(way, trip, subject, saved, 41, "restored after a refusal")


def _check_failed_restores(subject: PoolUnderTest) -> None:
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
