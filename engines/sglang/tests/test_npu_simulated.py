"""SGLang's NPU pools on simnpu, which is asynchronous and has memory of its own.

They run in other processes, since torch can't remove a device again, and SGLang looks for one.
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
    """For each schedule and case: SGLang's own result, kvtide's result, and what is wrong."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *SCHEDULES]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module", params=SCHEDULES)
def found(request: pytest.FixtureRequest, outcomes: list[list[str]]) -> Found:
    """The results in one schedule, by the case's name."""
    return {name: more for schedule, name, *more in outcomes if schedule == request.param}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kvtide_moves_every_byte_of_an_npu(case: Case, found: Found) -> None:
    """The bytes go into other slots, and no other request's byte changes."""
    assert ["exact", ""] == found[case.name][1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglang_alone_on_an_npu_is_as_the_table_says(case: Case, found: Found) -> None:
    """A control: the result is the same as on tensors of the CPU."""
    assert case.alone == found[case.name][0]
