"""The self-check accepts only what is exact, whichever processor the libraries run on.

They choose their kernels by the processor. Here they are made to choose as on other processors,
before they load: an older one, one without bfloat16 instructions, one that MKL doesn't know.
`make soak` does the same with more models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "exact" / "bench.py"
PROCESSORS = {
    "without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2 alone": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
    },
    "SSE alone": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
    },
}


def report_on(
    settings: dict[str, str], *options: str, models: int = 1, threads: tuple[str, ...] = ("2",)
) -> Any:
    """Runs models in both dtypes, each in three engines, and returns the report."""
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    fixed = ["--models", str(models), "--requests", "6", "--json"]
    done = subprocess.run(
        [sys.executable, BENCH, *fixed, "--threads", *threads, *options],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr + done.stdout
    report = json.loads(done.stdout)
    findings = report["models"]
    assert models * 2 * len(threads) == len(findings)
    assert all(found["compared"] > 100 and found["retractions"] for found in findings)
    assert [] == [f for f in findings if f["differing"] or f["exact_rows"] is None]
    return report


@pytest.mark.parametrize("name", PROCESSORS)
def test_accepted_models_are_exact(name: str) -> None:
    """Every answer is exact with the kernels for this processor."""
    found = report_on(PROCESSORS[name])["machine"]["environment"]
    assert PROCESSORS[name].items() <= found.items()


def test_accepted_models_are_exact_on_this_processor() -> None:
    """Every answer is exact with one thread and with two."""
    report_on({}, models=2, threads=("1", "2"))


def test_accepted_models_are_exact_without_repeatable_mkl() -> None:
    """If torch computed first, attention may depend on its thread: that costs only speed."""
    assert report_on({}, "--mkl-as-it-likes")["machine"]["mkl_repeatable"] is not True
