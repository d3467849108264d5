"""The code stays small to its reader, by the figures of benchmarks/structure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "structure" / "figures.py"
LONGEST_MEDIAN = 7
MOST_CLASSES = 20


@pytest.fixture(scope="module")
def figures() -> Any:
    """What the script prints, in a process of its own: it traces one."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_half_of_all_functions_are_short(figures: Any) -> None:
    """In lines, docstrings included."""
    whole = figures["parts"][-1]
    assert "all" == whole["part"]
    assert 1_000 < whole["functions"]
    assert whole["median"] <= LONGEST_MEDIAN


def test_kv_meets_few_classes_on_its_way(figures: Any) -> None:
    """From offload to restore, errors and row rules aside."""
    assert figures["class_count"] <= MOST_CLASSES, figures["classes"]


def test_trace_sees_the_whole_way(figures: Any) -> None:
    """What is called in a lane's thread too."""
    assert ["Tide"] == figures["classes"]["tide"]
    assert {"CPUDevice", "Threads", "Step"} <= {*figures["classes"]["device"]}
    assert "Device" in figures["protocols"]["device"]
