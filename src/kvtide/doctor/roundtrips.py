"""Round trips of every declared layout, with samples and reference of the conformance kit.

A round trip fills a pool with random bytes, offloads some slots, overwrites the whole pool, and
restores into other slots. Then it compares every byte of the pool: the restored bytes, and all
bytes that must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

from kvtide.conformance.pool_under_test import KINDS, Make
from kvtide.conformance.samples import SAMPLES, Sample
from kvtide.conformance.trips import make_trip
from kvtide.conformance.ways import TideWay, block_sizes, go, some_tokens
from kvtide.device import Device
from kvtide.doctor.finding import Finding, attempt
from kvtide.doctor.here import Opened
from kvtide.layout import Geometry

ORDERS = ("contiguous", "pages", "reversed", "scattered")


@final
@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The result of all round trips of a geometry: the first failure, or none."""

    geometry: Geometry
    finding: Finding

    def to_json(self) -> dict[str, object]:
        """The geometry and the result, as one object."""
        geometry = self.geometry
        planes = [
            {
                "name": plane.name,
                "dtype": plane.dtype,
                "layers": plane.layer_count,
                "row": list(plane.row_shape),
            }
            for plane in geometry.planes
        ]
        return {
            "layout": geometry.layout.name,
            "planes": planes,
            "page_size": geometry.page_size,
            "token_bytes": geometry.token_bytes,
            "exact": self.finding.ok,
            "reason": self.finding.reason,
        }


def make_round_trips(opened: Opened) -> Iterator[RoundTrip]:
    """Tries each sample and gives the results one by one; none if the device isn't open."""
    if opened.device is None:
        return
    for sample in SAMPLES:
        trips = partial(_go_all_ways, sample, opened.device, opened.synchronize)
        yield RoundTrip(sample.geometry, attempt(sample.name, trips, settle=opened.synchronize))


def _go_all_ways(sample: Sample, device: Device, settle: Callable[[], None]) -> str | None:
    """A round trip in each kind of pool, each with another order of slots; the first failure."""
    for number, (kind, make) in enumerate(KINDS.items()):
        go_once = partial(_go, make, sample, device, number)
        trip = attempt(ORDERS[number], go_once, settle=settle)
        if trip.reason is not None:
            pool = "created pool" if kind == "created" else f"adopted pool, {kind}"
            return f"{pool}, {ORDERS[number]} slots: {trip.reason}"
    return None


def _go(make: Make, sample: Sample, device: Device, number: int) -> str | None:
    """A round trip of more than one chunk; returns the place of a wrong byte, or None."""
    subject = make(sample, device)
    way = TideWay(subject, block_sizes(subject)["some rows"])
    trip = make_trip(subject, some_tokens(subject), number, ORDERS[number])
    try:
        go(way, trip, subject, seed=number)
    except AssertionError as error:
        return str(error)
    return None
