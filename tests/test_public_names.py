"""`import kvtide` is light, and has what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvtide


@pytest.mark.parametrize("name", kvtide.__all__)
def test_public_name_is_there(name: str) -> None:
    """Each is imported from its home when it is asked for."""
    assert getattr(kvtide, name) is not None
    assert name in dir(kvtide)


def test_names_in_the_library_s_page_are_public() -> None:
    """Its reader isn't told to import them from elsewhere."""
    page = Path(__file__).parent.parent / "docs" / "library.md"
    named = set(re.findall(r"`([A-Z]\w*)[.(`]", page.read_text("utf-8")))
    assert {"Seal", "Snapshot", "SlotError", "PageAllocator"} <= named
    assert set() == named - {*kvtide.__all__}


def test_other_names_are_not() -> None:
    """A typing mistake is an AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'Tides'"):
        kvtide.Tides  # noqa: B018


def test_import_leaves_torch_alone() -> None:
    """It takes seconds, and not everybody who imports kvtide needs it."""
    code = "import sys, kvtide; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
