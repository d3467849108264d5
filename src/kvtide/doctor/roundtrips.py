"""Round trips of every declared layout, by the samples and the reference of the conformance kit.

Random bytes, offload, other bytes over all of the pool, restore into other slots. Then every byte
of the pool is compared: those that should have come back, and those that should not have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

from kvtide.conformance.samples import SAMPLES, Sample
from kvtide.conformance.subjects import KINDS, Make
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
    """What came of all round trips with one geometry: the first failure, or none."""

    geometry: Geometry
    finding: Finding

    def to_json(self) -> dict[str, object]:
        """What moved, and what came of it."""
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
    """One for each sample, as soon as it is known; none if kvtide can't open the device."""
    if opened.device is None:
        return
    for sample in SAMPLES:
        trips = partial(_go_all_ways, sample, opened.device, opened.synchronize)
        yield RoundTrip(sample.geometry, attempt(sample.name, trips, settle=opened.synchronize))


def _go_all_ways(sample: Sample, device: Device, settle: Callable[[], None]) -> str | None:
    """A pool of each kind, its slots lying otherwise in each; the first that goes wrong, if any."""
    for number, (kind, make) in enumerate(KINDS.items()):
        go_once = partial(_go, make, sample, device, number)
        trip = attempt(ORDERS[number], go_once, settle=settle)
        if trip.reason is not None:
            pool = "created pool" if kind == "created" else f"adopted pool, {kind}"
            return f"{pool}, {ORDERS[number]} slots: {trip.reason}"
    return None


def _go(make: Make, sample: Sample, device: Device, number: int) -> str | None:
    """One round trip of more than a chunk; returns where a byte isn't what it should be."""
    subject = make(sample, device)
    way = TideWay(subject, block_sizes(subject)["some rows"])
    trip = make_trip(subject, some_tokens(subject), number, ORDERS[number])
    try:
        go(way, trip, subject, seed=number)
    except AssertionError as error:
        return str(error)
    return None
