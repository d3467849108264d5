"""What `kvtide run` says before it loads torch, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# With this, an import of torch or transformers raises ModuleNotFoundError.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from kvtide.cli import start
sys.exit(start())
"""


def _run(model: str, folder: Path, *options: str) -> tuple[int, str]:
    """Runs the command on a prompt where nothing is kept or can be fetched."""
    environment = {
        **os.environ,
        "KVTIDE_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "run", "-p", "Hi", "--model", model, *options],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody", "there is no model 'nobody'"),
        ("missing.gguf", "there is no model"),
        ("a/b/c", "there is no model"),
        ("org/name", "HF_HUB_OFFLINE"),
        ("smollm2", "can't be downloaded"),
        ("empty", "it has no config.json"),
        ("weightless", "has no weights"),
        ("broken", "is not a complete file of safetensors"),
        ("text.gguf", "is not a GGUF file"),
        ("", "there is no model ''"),
    ],
)
def test_a_missing_model_is_told_before_torch_is_loaded(
    name: str, reason: str, tmp_path: Path
) -> None:
    """A name, a file, a folder and an id on the hub may each be wrong."""
    for folder in ("empty", "weightless", "broken"):
        (tmp_path / folder).mkdir()
    for folder in ("weightless", "broken"):
        (tmp_path / folder / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x" * 99)
    (tmp_path / "text.gguf").write_text("text", encoding="utf-8")
    model = str(tmp_path / name) if (tmp_path / name).exists() and name else name
    code, said = _run(model, tmp_path)
    assert reason in said.splitlines()[-1]
    assert (2, True) == (code, said.splitlines()[-1].startswith("kvtide: "))


def test_a_run_says_at_once_that_it_loads_torch(tmp_path: Path) -> None:
    """The line comes before the import, which fails in this test and ends the run."""
    code, said = _run("tiny-random", tmp_path)
    assert "loading torch" == said.splitlines()[0]
    assert (2, True) == (code, "torch is not installed" in said.splitlines()[-1])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('raise ModuleNotFoundError("there is no mooncake")', "pip install 'kvtide[mooncake]'"),
        ('raise ImportError("libibverbs.so.1: no such file")', "apt install libibverbs1 libnl-3"),
        ("MooncakeDistributedStore = None", "no master at 127.0.0.1:1: "),
    ],
)
def test_a_mooncake_store_that_cannot_be_joined_is_told_before_torch_is_loaded(
    content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package, a library that it needs, or the master may be missing."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "store.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    code, output = _run("tiny-random", tmp_path, "--mooncake", "127.0.0.1:1")
    assert (2, True) == (code, output.startswith("kvtide: mooncake tier: "))
    assert said in output
    assert 1 == len(output.splitlines())
