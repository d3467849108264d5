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


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example_passes(name: str, code: str, tmp_path: Path) -> None:
    """In a folder of its own, with nothing of this repository's tests."""
    (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 0 == done.returncode, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= 9
