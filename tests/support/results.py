"""Reads the files that `kvtide run` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of `--out`, one object from each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def read_part(out: Path) -> list[str]:
    """The ids of the lines that the part beside `--out` has after its header, as they came."""
    header, *rows = read_rows(out.with_name(out.name + ".part"))
    assert header["kvtide"] == 1
    return [row["id"] for row in rows]


def read_report(path: Path) -> dict[str, Any]:
    """Reads the object of `--report`."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
