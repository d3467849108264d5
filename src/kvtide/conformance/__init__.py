"""The conformance kit: tests that every layout, pool, device and tier must pass.

    from kvtide.conformance import PoolTests

    class TestMyPool(PoolTests): ...      # give it three small methods; it inherits the tests

`LayoutTests` tests a declared layout, `PoolTests` your pool, `DeviceTests` your device, `TierTests`
your tier.
docs/extend.md has an example of each. These classes need pytest; nothing else here does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.conformance.devices import DeviceTests
    from kvtide.conformance.layouts import LayoutTests
    from kvtide.conformance.pool_under_test import PoolUnderTest
    from kvtide.conformance.pools import PoolTests
    from kvtide.conformance.samples import SAMPLES, Sample
    from kvtide.conformance.tiers import TierTests

__all__ = [
    "SAMPLES",
    "DeviceTests",
    "LayoutTests",
    "PoolTests",
    "PoolUnderTest",
    "Sample",
    "TierTests",
]

# Imported when needed: `kvtide doctor` uses the samples where pytest may not be installed.
_HOME_OF = {
    "DeviceTests": "kvtide.conformance.devices",
    "LayoutTests": "kvtide.conformance.layouts",
    "PoolTests": "kvtide.conformance.pools",
    "SAMPLES": "kvtide.conformance.samples",
    "Sample": "kvtide.conformance.samples",
    "TierTests": "kvtide.conformance.tiers",
    "PoolUnderTest": "kvtide.conformance.pool_under_test",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF[name]
    if name.endswith("Tests") and home not in sys.modules:
        import pytest

        pytest.register_assert_rewrite(home)  # so that a failed assert shows both values
    return getattr(import_module(home), name)
