"""`kvtide run` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cluster import environment

_KVTIDE = "import sys; from kvtide.cli import start; sys.exit(start())"
_PAUSE = """
import os, signal
from kvtide.tier import MooncakeTier
from kvtide.tier.namespace import is_shared

def put_and_pause(tier, key, seal, chunks):
    put(tier, key, seal, chunks)
    if not is_shared(key):
        MooncakeTier.put = put
        os.kill(os.getpid(), signal.SIGSTOP)

put, MooncakeTier.put = MooncakeTier.put, put_and_pause
"""


def write_prompts(folder: Path, count: int = 8) -> None:
    """Writes `prompts.jsonl`; the prompts have 20 tokens and more."""
    lines = [{"id": str(number), "prompt": "ab" * (10 + number)} for number in range(count)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")


def _patient() -> dict[str, str]:
    """The environment, with Mooncake's own patience: a busy machine may be slow to answer."""
    return {name: value for name, value in environment().items() if "TIMEOUT" not in name}


def begin(folder: Path, *words: str, program: str = _KVTIDE) -> subprocess.Popen[str]:
    """Starts `kvtide` with these words, in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=folder, env=_patient(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def begin_until_stored(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts `kvtide` and gives it back stopped by SIGSTOP, once a request's KV is in the store.

    Before that the store has only blocks, which several requests share.
    """
    process = begin(folder, *words, program=_PAUSE + _KVTIDE)
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if not found or found.si_code != os.CLD_STOPPED:
        raise AssertionError(process.communicate()[1])
    return process


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `kvtide` with these words, in a folder."""
    process = begin(folder, *words)
    output, said = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, output, said)
