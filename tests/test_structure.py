"""The code stays small for its reader, by the figures of benchmarks/structure."""

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
    """Runs the script in a new process, since it traces its process, and reads its output."""
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
    """Lines are counted with docstrings."""
    whole = figures["parts"][-1]
    assert "all" == whole["part"]
    assert 1_000 < whole["functions"]
    assert whole["median"] <= LONGEST_MEDIAN


def test_kv_meets_few_classes_from_offload_to_restore(figures: Any) -> None:
    """Errors and row rules don't count."""
    assert figures["class_count"] <= MOST_CLASSES, figures["classes"]


def test_trace_sees_all_threads(figures: Any) -> None:
    """The trace has the classes that a lane's thread uses, too."""
    assert ["Tide"] == figures["classes"]["tide"]
    assert {"CPUDevice", "Threads", "Step"} <= {*figures["classes"]["device"]}
    assert "Device" in figures["protocols"]["device"]
