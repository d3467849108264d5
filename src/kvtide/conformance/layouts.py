"""LayoutTests: what a declared layout must pass, in pools of every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod

import pytest

from kvtide.conformance import checks, ways
from kvtide.conformance.reference import Units, units_of
from kvtide.conformance.samples import Sample
from kvtide.conformance.subjects import KINDS, PoolUnderTest
from kvtide.conformance.trips import make_trip
from kvtide.device import CPUDevice, Device
from kvtide.layout import Geometry
from kvtide.layout.dtypes import DTYPE_BYTES


class LayoutTests(ABC):
    """Inherit this as `class TestMyLayout(LayoutTests)` and give it one method, `samples`.

    The tests bind the layout, make pools of it in all the ways that engines have, created and
    adopted, and move requests about in them. To run them on another device than the CPU,
    override the fixture `device`. `thorough = False` leaves out round trips of which there are
    others much alike, and pools of more than one kind where the kind hardly matters: for when
    there are many devices to try.
    """

    thorough = True
    _EVERY_KIND = ("test_round_trips_are_exact", "test_moves_are_fenced")

    @abstractmethod
    def samples(self) -> Sequence[Sample]:
        """Small geometries of the layout, with the planes that must come of them in numbers.

        Give each axis a size of its own, let widths be odd and layers several, and have one
        sample for each set of optional planes that there is.
        """

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """Where the pools are: the CPU, unless overridden."""
        device = CPUDevice(lanes=2)
        yield device
        device.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each sample, and for each kind of pool, where a test asks for them."""
        if "sample" in metafunc.fixturenames:
            metafunc.parametrize("sample", self.samples(), ids=lambda sample: sample.name)
        if "kind" in metafunc.fixturenames:
            every = self.thorough or metafunc.function.__name__ in self._EVERY_KIND
            metafunc.parametrize("kind", [*KINDS] if every else ["created"])

    def make_subject(self, sample: Sample, kind: str, device: Device) -> PoolUnderTest:
        """A pool of that kind."""
        return KINDS[kind](sample, device)

    # ---- the declaration ----------------------------------------------------------------

    def test_planes_are_those_that_were_meant(self, sample: Sample) -> None:
        """Names, dtypes, layers and rows, in order."""
        found = [(p.name, (p.dtype, p.layer_count, p.row_shape)) for p in sample.geometry.planes]
        assert list(sample.planes.items()) == found

    def test_bytes_are_counted(self, sample: Sample) -> None:
        """What a page of tokens costs, and a request beside them."""
        geometry = sample.geometry
        page_bytes = request_bytes = 0
        for plane in geometry.planes:
            dtype, layer_count, row = sample.planes[plane.name]
            size_bytes = layer_count * prod(row) * DTYPE_BYTES[dtype]
            if plane.tokens_per_row:
                page_bytes += ceil(sample.page_size / plane.tokens_per_row) * size_bytes
            else:
                request_bytes += size_bytes
        assert (page_bytes, request_bytes) == (geometry.page_bytes, geometry.request_bytes)
        assert ceil(page_bytes / sample.page_size) == geometry.token_bytes

    def test_geometries_are_told_apart(self, sample: Sample) -> None:
        """By every size, dtype, stage and rank; equal ones are equal."""
        geometry = sample.geometry
        assert geometry.fingerprint == sample.geometry.fingerprint
        others = [*changed(sample), replace(sample, first_layer=sample.first_layer + 1).geometry]
        for other in others:
            note = f"{geometry.sizes} is taken for {other.sizes}"
            assert geometry.fingerprint != other.fingerprint, note

    # ---- pools of every kind -----------------------------------------------------------

    def test_planes_lie_where_the_pool_says(
        self, sample: Sample, kind: str, device: Device
    ) -> None:
        """`pool.plane` views the bytes of that plane and layer."""
        checks.check_planes(self.make_subject(sample, kind, device))

    def test_round_trips_are_exact(self, sample: Sample, kind: str, device: Device) -> None:
        """For all counts, orders and forms of slots, in chunks of all sizes."""
        subject = self.make_subject(sample, kind, device)
        if self.thorough:
            checks.check_round_trips(subject)
        else:
            checks.check_boundaries(subject)

    def test_snapshot_has_the_bytes_of_the_format(
        self, sample: Sample, kind: str, device: Device
    ) -> None:
        """And owns them, so that it fits every pool of that geometry, whatever the source does."""
        subject = self.make_subject(sample, kind, device)
        checks.check_snapshot_bytes(subject)
        checks.check_snapshot_owns(subject)

    def test_refusals_change_nothing(self, sample: Sample, kind: str, device: Device) -> None:
        """Invalid slots, and snapshots that don't fit the target."""
        subject = self.make_subject(sample, kind, device)
        checks.check_failed_restores(subject)
        checks.check_refused_slots(subject)

    def test_moves_are_fenced(self, sample: Sample, kind: str, device: Device) -> None:
        """By what the device was asked for before, and after."""
        checks.check_fences(self.make_subject(sample, kind, device))

    # ---- between pools ----------------------------------------------------------------

    def test_snapshot_of_any_pool_fits_any(self, sample: Sample, device: Device) -> None:
        """Pools of every kind, and of other page sizes where no row is a page."""
        kinds = [*KINDS]
        for number, kind in enumerate(kinds):
            source = self.make_subject(sample, kind, device)
            other = replace(sample, page_size=sample.page_size + number)
            if any(units_of(each.geometry) != Units(1, 1) for each in (sample, other)):
                other = sample
            target = self.make_subject(other, kinds[(number + 1) % len(kinds)], device)
            trip = make_trip(source, ways.some_tokens(source), number, target=target)
            way = ways.TideWay(source, ways.block_sizes(source)["some rows"], target)
            ways.go(way, trip, source, target=target, note=f"{kind} to another")

    def test_stages_may_have_uneven_layers(self, sample: Sample, device: Device) -> None:
        """A stage counts its layers from its first; a snapshot of a stage fits no other stage."""
        first = replace(sample, first_layer=0)
        second = longer(replace(sample, first_layer=3))
        subjects = [self.make_subject(stage, "created", device) for stage in (first, second)]
        for subject in subjects:
            checks.check_planes(subject)
            checks.check_snapshot_owns(subject)
        checks.check_miss(subjects[0], subjects[1])
        like = self.make_subject(replace(sample, first_layer=3), "created", device)
        checks.check_miss(subjects[0], like)

    def test_optional_parts_may_be_absent(self, sample: Sample, device: Device) -> None:
        """A pool without an optional plane moves the others; its snapshot fits no pool with it."""
        whole = self.make_subject(sample, "created", device)
        for other in lessened(sample):
            subject = self.make_subject(other, "created", device)
            checks.check_snapshot_owns(subject)
            checks.check_miss(subject, whole)
            checks.check_miss(whole, subject)


def changed(sample: Sample) -> Iterator[Geometry]:
    """Geometries that differ in one size, each."""
    for axis, size in sample.sizes.items():
        other = size + 1 if isinstance(size, int) else [*size, 99]
        yield replace(sample, sizes={**sample.sizes, axis: other}).geometry


def longer(sample: Sample) -> Sample:
    """The same with another layer of everything."""
    axes = {axis for plane in sample.layout.planes for axis in plane.split()[1]}
    sizes = {
        axis: size if axis not in axes else size + 1 if isinstance(size, int) else [*size, 99]
        for axis, size in sample.sizes.items()
    }
    planes = {
        name: (dtype, layer_count + 1, row)
        for name, (dtype, layer_count, row) in sample.planes.items()
    }
    return replace(sample, sizes=sizes, planes=planes)


def lessened(sample: Sample) -> Iterator[Sample]:
    """The sample without one optional plane, for each that has an axis of its own."""
    present = [plane for plane in sample.layout.planes if plane.name in sample.planes]
    for plane in present:
        others = [other for other in present if other is not plane]
        alone = plane.sized_axes - {axis for other in others for axis in other.sized_axes}
        if plane.optional and alone:
            yield replace(
                sample,
                sizes={axis: size for axis, size in sample.sizes.items() if axis not in alone},
                planes={name: it for name, it in sample.planes.items() if name != plane.name},
            )
