"""Sizes in bytes as people write them (`24MiB`, `1.5GiB`, `512KB`, `1000000`), and counts."""

from __future__ import annotations

import re
from fractions import Fraction

from kvtide.errors import UsageError, shortened

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", re.IGNORECASE)
_LARGEST = 2**63 - 1
_LEAST_BYTES_WITHOUT_UNIT = 2**20
_ACCEPTED = (
    "a number of bytes such as 1000000, or a number with a unit: "
    "B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), such as 24MiB"
)


def parse_size(text: str, *, name: str) -> int:
    """Parses `text`, the value of `name` (such as `--kv-memory`), to bytes, rounded down.

    Letter case doesn't matter, and a space may stand before the unit. Raises UsageError, which
    names the value and the accepted forms.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match and _UNITS.get(match[2].lower() or "b")
    if not match or not unit:
        raise UsageError(f"{name}: {shortened(text)!r} is not a size; accepted: {_ACCEPTED}")
    # A float would round sizes above 2**53 and decimal fractions.
    size = int(Fraction(match[1]) * unit)
    if size > _LARGEST:
        raise UsageError(f"{name}: {shortened(text)!r} is more than 2**63 - 1 bytes")
    return size


def parse_memory(text: str, *, name: str) -> int:
    """Parses an amount of host memory as `parse_size` does, except for a few bytes without a unit.

    Whoever writes 24 means another unit than bytes, so that is a UsageError. 0 is none.
    """
    size_bytes = parse_size(text, name=name)
    has_unit = text.strip()[-1].isalpha()
    if not has_unit and 0 < size_bytes < _LEAST_BYTES_WITHOUT_UNIT:
        raise UsageError(
            f"{name}: {shortened(text)!r} has no unit, so it is {counted(size_bytes, 'byte')}, too "
            "few for any request; write one, such as 24GiB"
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Formats a number of bytes with at most four digits, in the unit that fits: `22.5 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Not 1024: 1023.96 would be shown as 1024.0.
        if size < 1023.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 token`, `1,234 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
