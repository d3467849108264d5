from __future__ import annotations

import pytest

from kvtide.plugin.sglang.cases.all_cases import CASES
from kvtide.plugin.sglang.cases.round_trips import Case, KvtideWay, TripResult, Way, round_trip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kvtide_moves_every_byte(case: Case) -> None:
    """Into other slots, and no byte of anybody else's."""
    assert TripResult("exact") == round_trip(case, KvtideWay())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_alone_is_as_the_table_says(case: Case) -> None:
    """The control: the same pool, the same comparison, SGLang's own methods."""
    assert case.alone == round_trip(case, Way()).verdict
