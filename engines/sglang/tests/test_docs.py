"""The tables in docs/sglang.md equal those of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The module of engines/sglang/table.py."""
    spec = importlib.util.spec_from_file_location("table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lines(script: ModuleType) -> list[str]:
    """The lines that a run gives now."""
    return list(script.tables())


def test_the_tables_equal_those_of_a_run(script: ModuleType, lines: list[str]) -> None:
    """If this fails, run table.py, and read what has changed."""
    assert [] == script.differences(script.DOCS.read_text("utf-8"), lines)


@pytest.mark.parametrize("word", ["exact", "crash", "no copy"])
def test_a_changed_row_is_found(word: str, script: ModuleType, lines: list[str]) -> None:
    """The test changes one word of one row."""
    text = script.rewritten(script.DOCS.read_text("utf-8"), lines)
    altered = text.replace(f" {word} |", " right |", 1)
    assert 2 == sum(line[1:2] == "|" for line in script.differences(altered, lines))
