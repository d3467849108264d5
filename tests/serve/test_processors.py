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

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "exact" / "bench.py"
PROCESSORS = {
    "this one": {},
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
    "MKL as it likes": {"MKL_CBWR": "OFF"},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_accepted_is_exact(name: str) -> None:
    """Models of unlike shapes, in both dtypes, with one thread and two, in three engines."""
    settings = PROCESSORS[name]
    kept = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
    options = ["--models", "3", "--requests", "8", "--dtype", "float32", "bfloat16"]
    done = subprocess.run(
        [sys.executable, BENCH, *options, "--threads", "1", "2", "--json"],
        env=kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert settings.items() <= report["machine"]["environment"].items()
    models = report["models"]
    assert 12 == len(models)
    assert [] == [one for one in models if one["differing"] or one["exact_rows"] is None]
    assert all(one["compared"] > 100 and one["retractions"] for one in models)
    assert 0 == done.returncode, done.stderr
