"""Settings of an operator: a mistyped variable is named, for every engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvtide
from kvtide.errors import UsageError
from kvtide.plugin.environment import OF_KVTIDE, host_memory_bytes, unknown_variables

NAMES = ("KVTIDE_HOST_MEMORY", "KVTIDE_TOY", "KVTIDE_TOY_COLOCATED")


@pytest.mark.parametrize("text", ["24", "24000", "1048575"])
def test_few_bytes_without_a_unit_are_refused(text: str) -> None:
    """No arena is that small; the mistake would show only when a request is retracted."""
    is_bytes = f"'{text}' has no unit, so it is {int(text):,} bytes"
    said = f"^KVTIDE_HOST_MEMORY: {is_bytes}.*such as 24GiB$"
    with pytest.raises(UsageError, match=said):
        host_memory_bytes({"KVTIDE_HOST_MEMORY": text})


@pytest.mark.parametrize("text", ["0", "0GiB"])
def test_no_memory_is_refused(text: str) -> None:
    """Nothing could be saved, and the plugin would look as if it were on."""
    said = f"^KVTIDE_HOST_MEMORY: '{text}' is no room for any request$"
    with pytest.raises(UsageError, match=said):
        host_memory_bytes({"KVTIDE_HOST_MEMORY": text})


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1048576", 1 << 20), ("24GiB", 24 << 30), ("8KiB", 8192), ("24B", 24)]
)
def test_a_plausible_size_is_accepted(text: str, size_bytes: int) -> None:
    """Such a size has a unit, or at least as many digits as an arena has in bytes."""
    assert size_bytes == host_memory_bytes({"KVTIDE_HOST_MEMORY": text})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("KVTIDE_HOST_MEMROY", "KVTIDE_HOST_MEMROY (did you mean KVTIDE_HOST_MEMORY?)"),
        ("KVTIDE_MEMORY", "KVTIDE_MEMORY (did you mean KVTIDE_HOST_MEMORY?)"),
        ("kvtide_toy", "kvtide_toy (did you mean KVTIDE_TOY?)"),
        ("KVTIDE_COLOCATED", "KVTIDE_COLOCATED (did you mean KVTIDE_TOY_COLOCATED?)"),
        ("KVTIDE_CONFIGS", "KVTIDE_CONFIGS (did you mean KVTIDE_CONFIG?)"),
        ("KVTIDE_WATCH", "KVTIDE_WATCH"),
        ("KVTIDE_A\nB", "'KVTIDE_A\\nB'"),
    ],
)
def test_an_unknown_variable_is_named_with_the_closest_known(name: str, said: str) -> None:
    """A name that resembles no known one is named alone; line breaks in names are escaped."""
    known = dict.fromkeys([*NAMES, *OF_KVTIDE, "HOME", "KVTIDE"], "1")
    assert [said] == unknown_variables(NAMES, {**known, name: "1"})
    assert [] == unknown_variables(NAMES, known)


def test_every_variable_that_kvtide_reads_is_known() -> None:
    """Each engine's plugin has a list of the variables that it reads."""
    files = [
        path
        for path in Path(kvtide.__file__).parent.rglob("*.py")
        if not {"sglang"}.intersection(path.parts)
    ]
    read = {name for path in files for name in re.findall(r'"(KVTIDE_\w+)"', path.read_text())}
    assert {*OF_KVTIDE} == read
