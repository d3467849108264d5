"""Settings of all tests, and the device that most of them share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from kvtide.device import CPUDevice

if TYPE_CHECKING:
    from server.page.chromium import Browser

# The time of an example depends on the machine, not on the code.
settings.register_profile("kvtide", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtide")


# A shell starts background processes with Ctrl-C ignored, nohup with SIGHUP. Tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def device() -> Iterator[CPUDevice]:
    """A CPU device of two lanes."""
    device = CPUDevice(lanes=2)
    yield device
    device.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A Chromium, which all tests of the page in a process share."""
    from server.page.chromium import browser

    with browser() as opened:
        yield opened
