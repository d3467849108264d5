"""The checks of the doctor, each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simnpu
import torch

from kvtide.conformance import SAMPLES
from kvtide.doctor.finding import attempt
from kvtide.doctor.here import Here, default_device, open_for_checkup
from kvtide.doctor.roundtrips import make_round_trips
from kvtide.doctor.speed import _copying, _ratios, choose_size
from kvtide.measure.timing import Timing
from support.simulated import simulated

HERE = Here("a device", 0, None, None, True, None)


def test_every_sample_is_tried() -> None:
    """The doctor tries every layout in created and adopted pools."""
    opened = open_for_checkup("cpu")
    assert opened.device is not None
    found = [*make_round_trips(opened)]
    opened.device.close()
    assert [sample.geometry.fingerprint for sample in SAMPLES] == [
        trip.geometry.fingerprint for trip in found
    ]
    assert [None] * len(SAMPLES) == [trip.finding.reason for trip in found]


def test_late_error_belongs_to_the_check_that_made_it() -> None:
    """An error that a device raises at a later wait is put down to the check that caused it."""
    pending: list[str] = ["the kernel failed"]

    def settle() -> None:
        if pending:
            raise RuntimeError(pending.pop())

    findings = [
        attempt(name, lambda: None, settle=settle, consequence="it is of no use")
        for name in ("first", "second")
    ]
    assert ["RuntimeError: the kernel failed", None] == [finding.reason for finding in findings]
    assert ["it is of no use", ""] == [finding.consequence for finding in findings]


def test_late_error_of_a_check_that_raised_is_dropped() -> None:
    """The reason is the check's first error, and the next check sees neither."""
    pending: list[str] = ["and then this"]

    def settle() -> None:
        if pending:
            raise RuntimeError(pending.pop())

    def check() -> None:
        raise ValueError("this first")

    assert "ValueError: this first" == attempt("a", check, settle=settle).reason
    assert attempt("b", lambda: None, settle=settle).ok


def test_interrupt_is_not_a_finding() -> None:
    """Ctrl-C ends the command, not only a check."""

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt("a", check, settle=lambda: None)


def test_size_fits_the_device() -> None:
    """The size is an eighth of the free memory in whole MiB; an unknown size sets no limit."""
    mib = 1 << 20
    assert 64 * mib == choose_size(64 * mib, HERE)
    for free_mib, expected_mib in ((1000, 64), (100, 12), (3, 1)):
        here = replace(HERE, free_bytes=free_mib * mib)
        assert expected_mib * mib == choose_size(64 * mib, here)


def test_ratios_compare_with_the_copy_in_the_same_direction() -> None:
    """Gathers are compared with copies to the host, scatters with copies to the device."""
    seconds = {
        ("pinned", "to_host"): 1.0,
        ("pinned", "to_device"): 3.0,
        ("pageable", "to_host"): 7.0,
        ("pages", "gather"): 2.0,
        ("pages", "scatter"): 4.0,
    }
    timings = {key: Timing(value, 0.0) for key, value in seconds.items()}
    assert {"gather": 0.5, "scatter": 0.75} == _ratios(timings, "pages", "pinned")
    assert {"gather": 3.5} == _ratios(timings, "pages", "pageable")
    assert {} == _ratios(timings, "random", "pinned")


@pytest.mark.parametrize("way", ["to the device", "to the host"])
def test_timed_copy_has_finished_when_its_call_returns(way: str) -> None:
    """Otherwise only the request for the copy would be timed."""
    with simulated("lazy") as name:
        opened = open_for_checkup(name)
        assert opened.device is not None
        ends = opened.device.allocate(64), opened.allocate_host(64).fill_(1)
        opened.synchronize()
        source, target = reversed(ends) if way == "to the device" else ends
        _copying(source, target, opened)()
        assert 0 == simnpu.pending()
        assert source.tolist() == target.tolist()
        opened.device.close()


@pytest.mark.parametrize(("is_there", "expected"), [(True, "meta"), (False, "cpu")])
def test_default_device_is_the_accelerator_that_is_there(
    is_there: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may have been built for an accelerator that this machine lacks."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta", 0))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_there)
    assert expected == default_device()
