from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch

from kvtide.plugin.sglang.cases.all_cases import CASES
from kvtide.plugin.sglang.cases.round_trips import (
    Built,
    Case,
    KvtideWay,
    TripResult,
    Way,
    round_trip,
)

FAILING = [case for case in CASES if case.alone != "exact"]
UNTRIED = ("MHA MXFP8, page 16", "MHA MXFP8, page 128, interleaved scales")
"""They fail on a CPU for lack of an operation that can't be imitated there."""


class AsOnCUDA(Way):
    """Copies with SGLang as on a CUDA machine, where its copies on the host aren't views."""

    def save(self, built: Built, slots: torch.Tensor, rows: Mapping[str, int]) -> Any:
        """See Way."""
        return deepcopy(super().save(built, slots, rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kvtide_moves_every_byte(case: Case) -> None:
    """The bytes go into other slots, and no other request's byte changes."""
    assert TripResult("exact") == round_trip(case, KvtideWay())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_alone_is_as_the_table_says(case: Case) -> None:
    """A control: the same pool and comparison with SGLang's own methods."""
    assert case.alone == round_trip(case, Way()).verdict


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.name)
def test_sglang_alone_fails_where_the_table_says(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases that fail without CUDA or on a CPU are exact with stand-ins for wait and copy."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    is_exact = round_trip(case, AsOnCUDA()).verdict == "exact"
    assert (case.only_on in ("no CUDA", "CPU") and case.name not in UNTRIED) == is_exact


def test_cases_that_were_not_tried_need_an_operation_of_an_accelerator() -> None:
    """The reason of such a case names a dtype or a kernel that a CPU lacks."""
    untried = [case for case in FAILING if case.name in UNTRIED]
    assert [("CPU", True)] * 2 == [
        (case.only_on, "float8_e8m0fnu" in case.reason or "kernel" in case.reason)
        for case in untried
    ]


def test_every_failure_has_a_reason_and_no_success_has() -> None:
    """The table and the doctor print the reasons."""
    assert [] == [case.name for case in CASES if bool(case.reason) == (case.alone == "exact")]
    assert [] == [case.name for case in CASES if case.only_on and case.alone == "exact"]
