"""The examples of docs/extend.md pass the kit, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_there_is_an_example_of_each_kind() -> None:
    """And no other code that nobody runs."""
    assert ["test_my_layout.py", "test_my_pool.py", "test_my_device.py"] == [
        name for name, _ in EXAMPLES
    ]
    assert len(EXAMPLES) == TEXT.count("```python")


def test_pool_of_a_stranger_is_short() -> None:
    """Thirty lines inherit all of it."""
    lines = [line for line in dict(EXAMPLES)["test_my_pool.py"].splitlines() if line.strip()]
    assert len(lines) <= 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """pytest on them, in a folder of their own with nothing of this repository's tests."""
    folder = tmp_path_factory.mktemp("examples")
    for name, code in EXAMPLES:
        (folder / name).write_text(code, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *(name for name, _ in EXAMPLES)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", [name for name, _ in EXAMPLES])
def test_example_passes(name: str, run: subprocess.CompletedProcess[str]) -> None:
    """All of its tests, of which there are some."""
    ends = re.findall(rf"^{re.escape(name)}::.* (\w+) +\[ *\d+%\]$", run.stdout, re.MULTILINE)
    assert {"PASSED"} == {*ends}, run.stdout
    assert len(ends) >= 9


def test_nothing_else_goes_wrong(run: subprocess.CompletedProcess[str]) -> None:
    """Such as an error at the very end."""
    assert 0 == run.returncode, run.stdout + run.stderr
