"""Every declared layout passes the kit, in pools of every kind.

The tests run on the CPU, and on the simulated accelerator in every schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules

import pytest

import kvtide.layout
from kvtide.conformance import SAMPLES, LayoutTests, Sample
from kvtide.device import AcceleratorDevice
from kvtide.layout import Layout
from support.simulated import SCHEDULES, simulated


class TestOnTheCPU(LayoutTests):
    """The CPU runs the whole kit."""

    def samples(self) -> Sequence[Sample]:
        """Returns samples of every layout of the package."""
        return SAMPLES


class TestOnASimulatedAccelerator(LayoutTests):
    """The simulated accelerator raises an error for every read of data that nobody waited for."""

    thorough = False

    def samples(self) -> Sequence[Sample]:
        """Returns samples of every layout of the package."""
        return SAMPLES

    @pytest.fixture(scope="class", params=SCHEDULES)
    @classmethod
    def device(cls, request: pytest.FixtureRequest) -> Iterator[AcceleratorDevice]:
        """Runs the tests in each schedule; at the end it raises every violation not yet raised."""
        with simulated(request.param) as name:
            device = AcceleratorDevice(name)
            yield device
            device.close()


def declared_layouts() -> dict[str, Layout]:
    """Finds every layout that a module of kvtide.layout declares, by module and name."""
    found: dict[str, Layout] = {}
    for module in iter_modules(kvtide.layout.__path__):
        members = vars(import_module(f"kvtide.layout.{module.name}"))
        found |= {f"{module.name}.{k}": v for k, v in members.items() if isinstance(v, Layout)}
    return found


def test_every_declared_layout_has_a_sample() -> None:
    """A new layout needs a sample, or the kit wouldn't try it."""
    declared = declared_layouts()
    assert len(declared) >= 22
    sampled = {id(sample.layout) for sample in SAMPLES}
    assert [] == [name for name, layout in declared.items() if id(layout) not in sampled]


def test_every_plane_is_in_a_sample() -> None:
    """An optional plane must be in at least one sample of its layout."""
    for layout in declared_layouts().values():
        tried = {name for sample in SAMPLES if sample.layout is layout for name in sample.planes}
        assert {plane.name for plane in layout.planes} == tried, layout.name


def test_samples_have_unique_names() -> None:
    """A failing test names its sample."""
    assert len(SAMPLES) == len({sample.name for sample in SAMPLES})
