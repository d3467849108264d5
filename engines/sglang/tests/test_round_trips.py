from __future__ import annotations

import pytest

from kvtide.plugin.sglang.cases.all_cases import CASES
from kvtide.plugin.sglang.cases.round_trips import Case, KvtideWay, TripResult, Way, round_trip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kvtide_moves_every_byte(case: Case) -> None:
    """The bytes go into other slots, and no other request's byte changes."""
    assert TripResult("exact") == round_trip(case, KvtideWay())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_alone_is_as_the_table_says(case: Case) -> None:
    """A control: the same pool and comparison with SGLang's own methods."""
    assert case.alone == round_trip(case, Way()).verdict
