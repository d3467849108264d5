"""An operator's settings: a slip of the hand is named, whatever engine it was made for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvtide
from kvtide.errors import UsageError
from kvtide.plugin.environment import OF_KVTIDE, host_memory_bytes, unknown_variables

NAMES = ("KVTIDE_HOST_MEMORY", "KVTIDE_TOY", "KVTIDE_TOY_COLOCATED")


@pytest.mark.parametrize("text", ["24", "0", "24000", "1048575"])
def test_few_bytes_without_a_unit_are_a_unit_left_out(text: str) -> None:
    """No arena is that small; nobody would notice before a request is retracted."""
    is_bytes = f"'{text}' has no unit, so it is {int(text):,} bytes"
    said = f"^KVTIDE_HOST_MEMORY: {is_bytes}.*such as 24GiB$"
    with pytest.raises(UsageError, match=said):
        host_memory_bytes({"KVTIDE_HOST_MEMORY": text})


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1048576", 1 << 20), ("24GiB", 24 << 30), ("8KiB", 8192), ("24B", 24)]
)
def test_a_size_that_is_meant_is_taken(text: str, size_bytes: int) -> None:
    """With a unit, or with as many digits as bytes have."""
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
    """One that resembles none is named alone; on one line, whatever is in it."""
    known = dict.fromkeys([*NAMES, *OF_KVTIDE, "HOME", "KVTIDE"], "1")
    assert [said] == unknown_variables(NAMES, {**known, name: "1"})
    assert [] == unknown_variables(NAMES, known)


def test_every_variable_that_kvtide_reads_is_known() -> None:
    """Those of engines' plugins are theirs to name."""
    files = [
        path
        for path in Path(kvtide.__file__).parent.rglob("*.py")
        if not {"sglang"}.intersection(path.parts)
    ]
    read = {name for path in files for name in re.findall(r'"(KVTIDE_\w+)"', path.read_text())}
    assert {*OF_KVTIDE} == read
