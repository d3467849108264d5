"""The README's example prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """The output is equal to the letter, except for addresses and the example's folder."""
    text = README.read_text()
    found = re.search(r"```python\n(import torch.*?)```\nprints\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    example, expected = found.groups()
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (0, "") == (done.returncode, done.stderr)
    printed = done.stdout.replace(f"{tmp_path}/", "")
    assert expected == re.sub(r"0x[0-9a-f]+", "0x...", printed)


def test_links_of_the_readme_lead_to_files() -> None:
    """The links lead to files of this folder."""
    links = re.findall(r"\]\(([\w/.]+)\)", README.read_text())
    assert links
    assert [] == [link for link in links if not (README.parent / link).exists()]
