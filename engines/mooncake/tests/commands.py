"""`kvtide run` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cluster import environment

KVTIDE = [sys.executable, "-c", "import sys; from kvtide.cli import start; sys.exit(start())"]


def write_prompts(folder: Path, count: int = 8) -> None:
    """Writes `prompts.jsonl`; the prompts have 20 tokens and more."""
    lines = [{"id": str(number), "prompt": "ab" * (10 + number)} for number in range(count)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")


def _patient() -> dict[str, str]:
    """The environment, with Mooncake's own patience: a busy machine may be slow to answer."""
    return {name: value for name, value in environment().items() if "TIMEOUT" not in name}


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts `kvtide` with these words, in a folder."""
    return subprocess.Popen(
        [*KVTIDE, *words],
        cwd=folder, env=_patient(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `kvtide` with these words, in a folder."""
    process = begin(folder, *words)
    output, said = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, output, said)
