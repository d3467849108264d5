"""A run that is ended again and again comes to the answers of an undisturbed one: in short.

`make soak` does the same with thousands of prompts, in processes that load everything themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOAK = Path(__file__).parents[2] / "benchmarks" / "run" / "soak.py"


def soak(folder: Path, *options: str) -> dict[str, Any]:
    """What the soak says, which must have found nothing wrong."""
    done = subprocess.run(
        [sys.executable, str(SOAK), *options, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_kind_of_end_keeps_every_answer(tmp_path: Path) -> None:
    """TERM, HUP, INT, KILL and a full disk each end real processes with real signals."""
    options = ["--prompts", "200", "--only", "lines.jsonl", "--ends", "5", "--fork", "--no-mount"]
    found = soak(tmp_path, *options)
    assert [] == found["problems"]
    assert found["suspended"] > 0
    assert {"TERM", "HUP", "INT", "KILL", "full disk"} == set(found["ended_by"])
    assert 0 < found["failed"] < found["prompts"]


def test_killed_commands_lose_nothing(tmp_path: Path) -> None:
    """SIGKILL at a random moment ends a command that loads everything itself, with KV on a disk.

    `make soak` does it fifty times.
    """
    options = ["--prompts", "60", "--only", "lines.jsonl", "--ends", "1", "--by", "KILL", "--long"]
    found = soak(tmp_path, *options, "--no-mount")
    assert [] == found["problems"]
    assert 1 <= found["ended_by"]["KILL"]
    assert "commands" == found["processes"]
