"""`kvtide run --simulate` in a process of its own, and by every schedule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.cli.main import main
from support.simulated import simulated

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
START = "from kvtide.cli import start; raise SystemExit(start())"
PATIENCE_S = 300


def run(options: str, prompts: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, since a device stays simulated until its process ends."""
    return subprocess.run(
        [sys.executable, "-c", START, "run", "-", *options.split()],
        input=prompts,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


# A page of 16 tokens takes 8 KiB; each request needs about 4 of these 8, all of them about 20.
LITTLE = "--model tiny-random --verify --max-new-tokens 16 --kv-memory 64KiB --device npu"
SIX = "".join(f'{{"id": "{i}", "prompt": "{"ab" * (5 + i)}"}}\n' for i in range(6))


def test_a_simulated_npu_gives_answers_that_verify() -> None:
    """The KV memory is small, so some requests are retracted and come back."""
    found = run(f"{LITTLE} --simulate --schedule lazy", SIX)
    assert 0 == found.returncode, found.stderr
    assert "verified: true (6 requests: " in found.stderr
    assert "retractions: 0" not in found.stderr


@pytest.mark.parametrize("schedule", ["eager", "random:5", "thread"])
def test_answers_verify_by_every_other_schedule(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device raises an error for every read of data that nobody waited for."""
    (tmp_path / "six").write_text(SIX, encoding="utf-8")
    with simulated(schedule):
        code = main(
            ["run", str(tmp_path / "six"), *LITTLE.split(), "--simulate", "--schedule", schedule]
        )
    captured = capsys.readouterr()
    assert 0 == code, captured.err
    assert "verified: true (6 requests: " in captured.err
    assert "retractions: 0" not in captured.err


def test_without_simulation_there_is_no_npu() -> None:
    """kvtide doesn't register the simulated device unless it is asked to."""
    found = run("--device npu", '{"id": "a", "prompt": "Hi"}\n')
    message = "loading torch\nkvtide: device 'npu' isn't known here; known are: cpu\n"
    assert (2, message) == (found.returncode, found.stderr)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("npu --schedule slow", "schedule 'slow' is unknown; known are: lazy, eager, random, "),
        ("npu --schedule lazy:1", "schedule 'lazy:1' is unknown; known are: lazy, eager, "),
        ("npu --schedule random:-1", "schedule 'random:-1' is unknown; known are: lazy, "),
        ("cpu", "device 'cpu' can't be simulated; name an accelerator, such as npu"),
        ("npu:x", "device 'npu:x' can't be simulated; name an accelerator, such as npu"),
        ("npu:2", "device 'npu:2' isn't here; of npu there are 0 to 1"),
        ("gpu", "device 'gpu' can't be simulated: simnpu: "),
    ],
)
def test_invalid_device_or_schedule_is_one_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and no model is loaded."""
    main(["run", str(PROMPTS), "--device", "npu:9", "--simulate"])  # now this process has npu
    capsys.readouterr()
    assert 2 == main(["run", str(PROMPTS), "--simulate", "--device", *options.split()])
    first, error = capsys.readouterr().err.splitlines()
    assert "loading torch" == first
    assert error.startswith(f"kvtide: {message}")
