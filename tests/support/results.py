"""Reads the files that `kvtide run` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of `--out`, one object from each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_report(path: Path) -> dict[str, Any]:
    """Reads the object of `--report`."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
