"""Describes this machine, for figures that were measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_WIDE_FLOAT_FLAGS = ("avx512_bf16", "amx_bf16")
_FIRST_PROCESSOR = Path("/sys/devices/system/cpu/cpu0")
# Fields of /proc/cpuinfo that differ from one moment or processor of a machine to another.
_PASSING: tuple[str, ...] = (
    "processor",
    "cpu MHz",
    "bogomips",
    "BogoMIPS",
    "apicid",
    "initial apicid",
    "core id",
)
_PASSING += ("physical id", "siblings", "cpu cores", "microcode", "bugs", "power management")


def machine_name() -> str:
    """The processor's name (on Linux; elsewhere its architecture) and the number of CPUs."""
    names = _values("model name")
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def processor_traits() -> str:
    """All that a library may choose its kernels by: family, model, instructions and caches.

    A virtual machine's name of its processor stands for several. Where the system doesn't tell
    (it isn't Linux), the name of the host is in it, so that no two hosts have the same.
    """
    first, _, _ = _cpuinfo().partition("\n\n")
    pairs = [line.partition(":") for line in first.splitlines()]
    traits = [f"{name.strip()}={value.strip()}" for name, _, value in pairs]
    kept = [trait for trait in traits if trait.partition("=")[0] not in _PASSING]
    if not kept:
        kept = [platform.machine(), platform.processor(), platform.node()]
    caches = sorted(_FIRST_PROCESSOR.glob("cache/index*/size"))
    return "; ".join([*kept, *(path.read_text("ascii").strip() for path in caches)])


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
    pairs = [line.partition(":") for line in _cpuinfo().splitlines()]
    return [value.strip() for name, _, value in pairs if name.strip() == field]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
