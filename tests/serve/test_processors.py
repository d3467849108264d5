"""What the self-check accepts is exact, whatever the libraries underneath do.

They choose their kernels by the processor. Here they are made to choose as on others, before they
load: an older one, one without bfloat16 instructions, one that MKL knows nothing of.
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


def report_on(settings: dict[str, str], *options: str, threads: tuple[str, ...] = ("2",)) -> Any:
    """What comes of two models, in both dtypes, in three engines each."""
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    fixed = ["--models", "2", "--requests", "6", "--json"]
    done = subprocess.run(
        [sys.executable, BENCH, *fixed, "--threads", *threads, *options],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr + done.stdout
    report = json.loads(done.stdout)
    models = report["models"]
    assert 4 * len(threads) == len(models)
    assert all(model["compared"] > 100 and model["retractions"] for model in models)
    assert [] == [model for model in models if model["differing"] or model["exact_rows"] is None]
    return report


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_accepted_is_exact(name: str) -> None:
    """Whatever the libraries choose their kernels for."""
    found = report_on(PROCESSORS[name])["machine"]["environment"]
    assert PROCESSORS[name].items() <= found.items()


def test_what_is_accepted_is_exact_on_this_processor() -> None:
    """With one thread and with two."""
    report_on({}, threads=("1", "2"))


def test_what_is_accepted_is_exact_where_mkl_was_not_told() -> None:
    """Torch computed first, so attention may depend on its thread: then that costs speed alone."""
    assert report_on({}, "--mkl-as-it-likes")["machine"]["mkl_repeatable"] is not True
