"""LayoutTests: what a declared layout must pass, in pools of every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import pytest

from kvtide.conformance import checks, refusals, ways
from kvtide.conformance.pool_under_test import KINDS, PoolUnderTest
from kvtide.conformance.reference import Units, units_of
from kvtide.conformance.samples import Sample, mistake_in
from kvtide.conformance.trips import make_trip
from kvtide.device import CPUDevice, Device
from kvtide.layout import Geometry
from kvtide.layout.dtypes import DTYPE_BYTES


class LayoutTests(ABC):
    """Inherit this as `class TestMyLayout(LayoutTests)` and give it one method, `samples`.

    The tests bind the layout, make pools of every kind that engines have, and move requests in
    them. To run the tests on another device than the CPU, override the fixture `device`. With
    `thorough = False` the tests leave out similar round trips, and use a single kind of pool where
    the kind hardly matters. This saves time if there are many devices to try.
    """

    thorough = True
    _OF_SAMPLES = "test_planes_are_as_the_sample_says"
    _EVERY_KIND = ("test_round_trips_are_exact", "test_moves_are_fenced")

    @abstractmethod
    def samples(self) -> Sequence[Sample]:
        """Small geometries of the layout, each with its expected planes in numbers.

        Give each axis a different size, use odd widths and several layers, and give one sample for
        each set of optional planes.
        """

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        """The device of the pools: the CPU, unless a subclass overrides this."""
        device = CPUDevice(lanes=2)
        yield device
        device.close()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes a test for each sample and each kind of pool, if the test has these parameters.

        Only one test runs on a wrong sample, so that it fails once.
        """
        if "sample" in metafunc.fixturenames:
            tries_samples = metafunc.function.__name__ == self._OF_SAMPLES
            params = [_param(sample, tries_samples) for sample in self.samples()]
            metafunc.parametrize("sample", params)
        if "kind" in metafunc.fixturenames:
            every = self.thorough or metafunc.function.__name__ in self._EVERY_KIND
            metafunc.parametrize("kind", [*KINDS] if every else ["created"])

    def make_subject(self, sample: Sample, kind: str, device: Device) -> PoolUnderTest:
        """A pool of that kind."""
        return KINDS[kind](sample, device)

    # ---- the declaration ----------------------------------------------------------------

    def test_planes_are_as_the_sample_says(self, sample: Sample) -> None:
        """Their names, dtypes, layers and rows are as expected, in this order.

        The sample has what its pools need. The other tests leave a wrong sample out.
        """
        found = [(p.name, (p.dtype, p.layer_count, p.row_shape)) for p in sample.geometry.planes]
        assert list(sample.planes.items()) == found
        mistake = mistake_in(sample)
        assert mistake is None, f"sample {sample.name}: {mistake}"

    def test_bytes_are_counted(self, sample: Sample) -> None:
        """The bytes of a page of tokens, and of a request without its tokens, are right."""
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
        """A change of any size or of the stage changes the fingerprint."""
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
        """All counts, orders and forms of slots are tried, in chunks of several sizes."""
        subject = self.make_subject(sample, kind, device)
        if self.thorough:
            checks.check_round_trips(subject)
        else:
            checks.check_boundaries(subject)

    def test_snapshot_has_the_bytes_of_the_format(
        self, sample: Sample, kind: str, device: Device
    ) -> None:
        """It holds a copy of them, so it fits every pool of that geometry."""
        subject = self.make_subject(sample, kind, device)
        checks.check_snapshot_bytes(subject)
        checks.check_snapshot_owns(subject)

    def test_refusals_change_nothing(self, sample: Sample, kind: str, device: Device) -> None:
        """The pool stays unchanged after invalid slots, and after snapshots that don't fit."""
        subject = self.make_subject(sample, kind, device)
        refusals.check_failed_restores(subject)
        refusals.check_refused_slots(subject)

    def test_moves_are_fenced(self, sample: Sample, kind: str, device: Device) -> None:
        """A move waits for all earlier work of the device, and all later work waits for it."""
        checks.check_fences(self.make_subject(sample, kind, device))

    # ---- between pools ----------------------------------------------------------------

    def test_snapshot_of_any_pool_fits_any(self, sample: Sample, device: Device) -> None:
        """A snapshot moves between kinds of pools, and between page sizes if no row is a page."""
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
        """Layers count from the stage's first; a snapshot of a stage fits no other stage."""
        first = replace(sample, first_layer=0)
        second = longer(replace(sample, first_layer=3))
        subjects = [self.make_subject(stage, "created", device) for stage in (first, second)]
        for subject in subjects:
            checks.check_planes(subject)
            checks.check_snapshot_owns(subject)
        refusals.check_miss(subjects[0], subjects[1])
        like = self.make_subject(replace(sample, first_layer=3), "created", device)
        refusals.check_miss(subjects[0], like)

    def test_optional_parts_may_be_absent(self, sample: Sample, device: Device) -> None:
        """A pool without an optional plane moves the others; its snapshot fits no pool with it."""
        whole = self.make_subject(sample, "created", device)
        for other in lessened(sample):
            subject = self.make_subject(other, "created", device)
            checks.check_snapshot_owns(subject)
            refusals.check_miss(subject, whole)
            refusals.check_miss(whole, subject)


def _param(sample: Sample, tries_samples: bool) -> Any:
    """The sample as a parameter; a test skips a wrong one unless it tries the samples."""
    if tries_samples or mistake_in(sample) is None:
        return pytest.param(sample, id=sample.name)
    reason = f"sample {sample.name} is wrong: {LayoutTests._OF_SAMPLES} says how"
    return pytest.param(sample, id=sample.name, marks=pytest.mark.skip(reason=reason))


def changed(sample: Sample) -> Iterator[Geometry]:
    """The sample's geometry with one size changed, for each size."""
    for axis, size in sample.sizes.items():
        other = size + 1 if isinstance(size, int) else [*size, 99]
        yield replace(sample, sizes={**sample.sizes, axis: other}).geometry


def longer(sample: Sample) -> Sample:
    """The sample with one more layer of each plane."""
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
    """The sample without one optional plane, for each such plane that alone has some axis."""
    present = [plane for plane in sample.layout.planes if plane.name in sample.planes]
    for plane in present:
        others = [other for other in present if other is not plane]
        alone = plane.sized_axes - {axis for other in others for axis in other.sized_axes}
        if plane.optional and alone:
            yield replace(
                sample,
                sizes={axis: size for axis, size in sample.sizes.items() if axis not in alone},
                planes={name: shape for name, shape in sample.planes.items() if name != plane.name},
            )
