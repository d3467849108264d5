from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import UsageError
from kvtide.sizes import format_size, parse_memory, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1000000", 1_000_000),
        ("0", 0),
        ("7B", 7),
        ("512KB", 512_000),
        ("512KiB", 524_288),
        ("24MiB", 25_165_824),
        ("1.5GiB", 1_610_612_736),
        ("0.1GB", 100_000_000),
        ("2TiB", 2_199_023_255_552),
        (" 24 mib ", 25_165_824),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_parse_to_bytes(text: str, size_bytes: int) -> None:
    """Units of 1000 and of 1024, decimals and letter case come out exactly."""
    assert size_bytes == parse_size(text, name="--kv-memory")


@pytest.mark.parametrize("text", ["24", " 24", "1.5", "1048575"])
def test_a_few_bytes_of_memory_without_a_unit_are_refused(text: str) -> None:
    """Nobody means bytes; with its unit the same amount is accepted, and so is none at all."""
    with pytest.raises(UsageError, match=rf"^--host-memory: '{text}' has no unit, so it is "):
        parse_memory(text, name="--host-memory")
    assert parse_size(text, name="") == parse_memory(f"{text}B", name="--host-memory")
    accepted = [parse_memory(size, name="--host-memory") for size in ("0", "1048576", "24GiB")]
    assert [0, 1 << 20, 24 << 30] == accepted


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "+1", "1e9", "nan", "inf", "12 parsecs", "1,5GiB", "0x10", ".5GiB", "5.GiB",
     "1 2", "24M", "٣MiB", "9223372036854775808", "9" * 5000, "1MiB; rm"],
)  # fmt: skip
def test_an_invalid_size_is_refused_by_name(text: str) -> None:
    """The error is one line: the option, the value and the accepted forms."""
    with pytest.raises(UsageError) as error:
        parse_size(text, name="--kv-memory")
    message = str(error.value)
    assert message.startswith(f"--kv-memory: {text[:10]!r}"[:-1])
    assert "\n" not in message
    assert len(message) < 300


def test_error_lists_the_units() -> None:
    """It answers `24M` with MB and MiB."""
    with pytest.raises(UsageError, match=r"MB.*MiB.*such as 24MiB"):
        parse_size("24M", name="--kv-memory")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (23_592_960, "22.5 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (2**45, "32.0 TiB"),
    ],
)
def test_sizes_format_in_the_unit_that_fits(size_bytes: int, text: str) -> None:
    """A value just below a unit is rounded up to that unit, not to 1024 of the smaller unit."""
    assert text == format_size(size_bytes)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_formatted_size_parses_to_nearly_the_same_size(size_bytes: int) -> None:
    """Formatting keeps at least two digits."""
    parsed = parse_size(format_size(size_bytes), name="x")
    assert abs(parsed - size_bytes) <= 0.05 * max(size_bytes, 1)
