"""The examples of docs/extend.md: each is one file and passes without an edit elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.measure.layouts import bind_for_models, size_of_axis

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


NAMES = [name for name, _ in EXAMPLES]
KIT_NAMES = ["test_my_layout.py", "test_my_pool.py", "test_my_device.py", "test_my_tier.py"]


def test_each_kind_has_an_example() -> None:
    """The document has no other code, which no test would run."""
    assert [*KIT_NAMES, "test_my_engine.py"] == NAMES
    assert len(EXAMPLES) == TEXT.count("```python")


def test_axis_of_the_new_layout_is_in_no_source() -> None:
    """The example shows that a new axis needs no edit, so no source may know it."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert "codebook" in dict(EXAMPLES)["test_my_layout.py"]
    assert sources
    assert not any("codebook" in source for source in sources)


def test_layout_with_an_unknown_axis_can_be_measured() -> None:
    """`kvtide bench copy --layouts` and the doctor bind layouts at sizes that models have."""
    names: dict[str, Any] = {}
    exec(compile(dict(EXAMPLES)["test_my_layout.py"], "docs/extend.md", "exec"), names)
    planes = {plane.name: plane.row_shape for plane in bind_for_models(names["MY_LAYOUT"]).planes}
    assert {"k", "v", "scale", "index"} == set(planes)
    assert (size_of_axis("codebook"), size_of_axis("head_dim")) == planes["k"]


def test_another_engine_needs_nothing_of_sglang() -> None:
    """No example uses SGLang."""
    assert [] == [name for name, code in EXAMPLES if "sglang" in code.lower()]


@pytest.mark.parametrize(
    ("name", "until", "most_lines"),
    [("test_my_pool.py", "", 30), ("test_my_tier.py", "class TestDatabaseTier", 50)],
)
def test_examples_are_short(name: str, until: str, most_lines: int) -> None:
    """A pool is counted with all its tests, and a tier without them."""
    code = dict(EXAMPLES)[name]
    code = code.partition(until)[0] if until else code
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= most_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Runs pytest on the examples, in a new folder without this repository's tests."""
    folder = tmp_path_factory.mktemp("examples")
    for name, code in EXAMPLES:
        (folder / name).write_text(code, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *NAMES],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_example_passes(name: str, run: subprocess.CompletedProcess[str]) -> None:
    """All tests of the example pass, and it has some."""
    ends = re.findall(rf"^{re.escape(name)}::.* (\w+) +\[ *\d+%\]$", run.stdout, re.MULTILINE)
    assert {"PASSED"} == {*ends}, run.stdout
    assert len(ends) >= (9 if name in KIT_NAMES else 2)


def test_nothing_else_goes_wrong(run: subprocess.CompletedProcess[str]) -> None:
    """pytest ends without an error, also after the last test."""
    assert 0 == run.returncode, run.stdout + run.stderr
