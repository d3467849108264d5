"""`import kvtide` is fast, and gives all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvtide


@pytest.mark.parametrize("name", kvtide.__all__)
def test_public_name_exists(name: str) -> None:
    """Each name is imported when it is first used."""
    assert getattr(kvtide, name) is not None
    assert name in dir(kvtide)


def test_names_in_the_library_s_page_are_public() -> None:
    """A reader of that page isn't told to import them from elsewhere."""
    page = Path(__file__).parent.parent / "docs" / "library.md"
    named = set(re.findall(r"`([A-Z]\w*)[.(`]", page.read_text("utf-8")))
    assert {"Seal", "Snapshot", "SlotError", "PageAllocator"} <= named
    assert set() == named - {*kvtide.__all__}


def test_other_names_do_not_exist() -> None:
    """A misspelt name is an AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'Tides'"):
        kvtide.Tides  # noqa: B018


def test_import_leaves_torch_alone() -> None:
    """torch takes seconds to import, and not every user of kvtide needs it."""
    code = "import sys, kvtide; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
