"""Describes this machine, for figures that were measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_WIDE_FLOAT_FLAGS = ("avx512_bf16", "amx_bf16")


def machine_name() -> str:
    """The processor's name (on Linux; elsewhere its architecture) and the number of CPUs."""
    names = _values("model name")
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def machine_facts() -> dict[str, Any]:
    """Facts about this machine for a committed result, as JSON."""
    names, flags = _values("model name"), " ".join(_values("flags")[:1]).split()
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "processors": len(names) or None,
        "bfloat16_instructions": [name for name in _WIDE_FLOAT_FLAGS if name in flags],
        "python": platform.python_version(),
    }


def _values(field: str) -> list[str]:
    """The values of a field for all processors; empty if the system isn't Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    pairs = [line.partition(":") for line in lines]
    return [value.strip() for name, _, value in pairs if name.strip() == field]
