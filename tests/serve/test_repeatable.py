"""kvtide tells torch's libraries to repeat their results; each test starts new processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call] # torch leaves it
    reason="this torch comes without MKL",
)
ASK = "; from kvtide.serve.repeatable import is_mkl_repeatable; print(is_mkl_repeatable())"
COMPUTE = "import torch; torch.ones(99, 99) @ torch.ones(99, 99)"


def run(code: str, **settings: str) -> list[str]:
    """Runs code in a new process, with only the given settings set, and returns what it prints."""
    names = ("MKL_CBWR", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return (done.stdout + done.stderr).splitlines()


@needs_mkl
def test_importing_the_engine_before_torch_computes_is_enough() -> None:
    """torch may be loaded before kvtide.serve or after it."""
    assert ["True"] == run(f"import kvtide.serve; {COMPUTE}{ASK}")
    assert ["True"] == run(f"import torch, kvtide.serve; {COMPUTE}{ASK}")


@needs_mkl
def test_a_program_that_computed_first_gets_a_warning() -> None:
    """An engine in exact mode warns and gives the remedy; it may still be exact."""
    build = (
        "from kvtide.serve.engine import Engine, EngineOptions; "
        "from kvtide.serve.models import open_model; "
        "from kvtide.serve.request import Request; "
        "Engine.build(open_model('tiny-random'), EngineOptions(), [Request('a', [1])]).close()"
    )
    answer, *warned = run(f"{COMPUTE}; {build}{ASK}")
    assert "False" == answer
    told = "".join(warned)
    assert "UserWarning: torch has computed before kvtide.serve was imported" in told
    assert "set MKL_CBWR=AUTO" in told
    assert "UserWarning" not in "".join(run(build))


@needs_mkl
def test_the_run_command_sets_mkl_in_time(tmp_path: Path) -> None:
    """The command loads torch before the engine, to look for the device."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "a"}\n')
    options = f"'{prompts}', '--model', 'tiny-random', '--max-new-tokens', '2'"
    answer = f"import sys; sys.argv = ['kvtide', 'run', {options}]; from kvtide.cli import start"
    assert "True" in run(f"{answer}; start(){ASK}")


def test_a_mode_in_the_environment_stays() -> None:
    """A mode that the user set isn't changed."""
    show = "import os, kvtide.serve; print(os.environ['MKL_CBWR'])"
    assert ["COMPATIBLE"] == run(show, MKL_CBWR="COMPATIBLE")
    assert ["AUTO"] == run(show)
    assert ["AUTO"] == run(show, MKL_CBWR="")  # MKL and OpenMP take an empty value for none


def test_the_command_sets_how_threads_wait_before_torch_is_loaded() -> None:
    """OpenMP reads the setting when torch loads; a value that the user set stays."""
    show = (
        "import os, sys; sys.argv = ['kvtide', '--version']; "
        "from kvtide.cli import start; start(); "
        "print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'), "
        "'torch' in sys.modules)"
    )
    assert "passive 1000 False" == run(show)[-1]
    assert "passive 1000 False" == run(show, OMP_WAIT_POLICY="")[-1]
    assert "passive 7 False" == run(show, GOMP_SPINCOUNT="7")[-1]
    assert "active None False" == run(show, OMP_WAIT_POLICY="active")[-1]
