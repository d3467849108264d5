"""SGLang's NPU pools on simnpu: asynchronous, and the device's memory is none of the host's.

In processes of their own, since torch can't be rid of a device again, and SGLang looks for one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.plugin.sglang.cases.ascend import CASES
from kvtide.plugin.sglang.cases.round_trips import Case

SCRIPT = Path(__file__).parent / "simulated_npu.py"
SCHEDULES = ("lazy", "random:1")
Found = dict[str, list[str]]


@pytest.fixture(scope="module")
def outcomes() -> list[list[str]]:
    """Of each schedule and case: what SGLang alone made of it, what kvtide did, what was wrong."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *SCHEDULES]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module", params=SCHEDULES)
def found(request: pytest.FixtureRequest, outcomes: list[list[str]]) -> Found:
    """Those under one schedule, by the case's name."""
    return {name: more for schedule, name, *more in outcomes if schedule == request.param}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kvtide_moves_every_byte_of_an_npu(case: Case, found: Found) -> None:
    """Into other slots, and no byte of anybody else's."""
    assert ["exact", ""] == found[case.name][1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_alone_on_an_npu_is_as_the_table_says(case: Case, found: Found) -> None:
    """The control: as on tensors of the CPU."""
    assert case.alone == found[case.name][0]
