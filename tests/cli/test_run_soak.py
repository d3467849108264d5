"""A run that is ended again and again comes to the answers of an undisturbed one: in short.

`make soak` does the same with thousands of prompts, in processes that load everything themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "run" / "soak.py"


def test_every_kind_of_end_keeps_every_answer(tmp_path: Path) -> None:
    """TERM, HUP, INT, KILL and a full disk each end real processes with real signals."""
    options = ["--prompts", "200", "--only", "lines.jsonl", "--ends", "5", "--fork", "--no-mount"]
    done = subprocess.run(
        [sys.executable, str(SOAK), *options, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [] == found["problems"]
    assert found["suspended"] > 0
    assert {"TERM", "HUP", "INT", "KILL", "full disk"} == set(found["ended_by"])
    assert 0 < found["failed"] < found["prompts"]
