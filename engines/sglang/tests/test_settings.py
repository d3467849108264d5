"""An operator's settings, and the values that are refused by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.plugin.sglang.settings import Settings, read_settings


def test_by_default_kvtide_is_on_with_a_default_limit() -> None:
    """An installed kvtide is active; an empty variable counts as one that isn't set."""
    assert Settings("on", False, None) == read_settings({})
    empty = {"KVTIDE_SGLANG": "", "KVTIDE_HOST_MEMORY": " ", "KVTIDE_CONFIG": ""}
    assert Settings("on", False, None) == read_settings(empty)


def test_all_variables_can_be_set() -> None:
    """Each variable arrives in its field."""
    environment = {
        "KVTIDE_SGLANG": "strict",
        "KVTIDE_SGLANG_COLOCATED": "1",
        "KVTIDE_HOST_MEMORY": "1.5 GiB",
    }
    assert Settings("strict", True, 3 << 29) == read_settings(environment)
    assert "off" == read_settings({"KVTIDE_SGLANG": "0"}).mode


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVTIDE_SGLANG", "yes", "'yes' is none of 0, 1, strict"),
        ("KVTIDE_SGLANG", "1" * 100, r"'1{37}\.\.\.' is none of"),
        ("KVTIDE_SGLANG_COLOCATED", "strict", "'strict' is none of 0, 1"),
        ("KVTIDE_HOST_MEMORY", "-1", "'-1' is not a size"),
        ("KVTIDE_HOST_MEMORY", "24 gigs", "'24 gigs' is not a size"),
        ("KVTIDE_HOST_MEMORY", "24", "'24' has no unit, so it is 24 bytes"),
        ("KVTIDE_HOST_MEMORY", "9999999999TiB", "more than 2"),
        ("KVTIDE_CONFIG", "/nowhere/kvtide.toml", "/nowhere/kvtide.toml can't be read"),
        ("KVTIDE_CONFIG", "/", "/ can't be read"),
        ("KVTIDE_CONFIG", "/dev/zero", "/dev/zero has more than 65536 bytes"),
        ("KVTIDE_CONFIG", "a\0b", "isn't a TOML file"),
    ],
)
def test_a_hostile_value_is_refused_by_name(name: str, value: str, said: str) -> None:
    """The message begins with the variable."""
    with pytest.raises(UsageError, match=f"^{name}: .*{said}"):
        read_settings({name: value})


def test_a_file_has_the_same_names_and_the_environment_wins(tmp_path: Path) -> None:
    """TOML's numbers and booleans are accepted like strings."""
    config = tmp_path / "kvtide.toml"
    config.write_text(
        'KVTIDE_SGLANG = "strict"\nKVTIDE_SGLANG_COLOCATED = true\nKVTIDE_HOST_MEMORY = 4194304\n'
    )
    found = {"KVTIDE_CONFIG": str(config)}
    assert Settings("strict", True, 4 << 20) == read_settings(found)
    found["KVTIDE_SGLANG"] = "1"
    found["KVTIDE_HOST_MEMORY"] = "8KiB"
    assert Settings("on", True, 8192) == read_settings(found)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"KVTIDE_HOST_MEMROY = 1", "'KVTIDE_HOST_MEMROY' isn't known"),
        (b"KVTIDE_CONFIG = 'other.toml'", "'KVTIDE_CONFIG' isn't known"),
        (b"KVTIDE_HOST_MEMORY = 1.5", "KVTIDE_HOST_MEMORY is a float, not a string"),
        (b"[KVTIDE_SGLANG]\nx = 1", "KVTIDE_SGLANG is a dict, not a string"),
        (b"KVTIDE_SGLANG 1", "isn't a TOML file"),
        (b"KVTIDE_SGLANG = '\xff'", "isn't a TOML file"),
        (b"#" * 65_537, "has more than 65536 bytes"),
    ],
)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    """The message names the file, and the entry in it."""
    config = tmp_path / "kvtide.toml"
    config.write_bytes(content)
    with pytest.raises(UsageError, match=f"^KVTIDE_CONFIG: {config}.*{said}"):
        read_settings({"KVTIDE_CONFIG": str(config)})


def test_an_invalid_value_in_a_file_is_refused_like_a_variable(tmp_path: Path) -> None:
    """A negative number isn't a size."""
    config = tmp_path / "kvtide.toml"
    config.write_text("KVTIDE_HOST_MEMORY = -1")
    with pytest.raises(UsageError, match=r"^KVTIDE_HOST_MEMORY: '-1' is not a size"):
        read_settings({"KVTIDE_CONFIG": str(config)})
    config.write_text("KVTIDE_HOST_MEMORY = 24")
    with pytest.raises(UsageError, match=r"^KVTIDE_HOST_MEMORY: '24' has no unit"):
        read_settings({"KVTIDE_CONFIG": str(config)})


def test_an_unknown_variable_is_no_error_and_is_kept() -> None:
    """The server's log and the doctor name it."""
    found = read_settings({"KVTIDE_SGLANG_COLOCATE": "1", "KVTIDE_CACHE": "/models"})
    assert ("KVTIDE_SGLANG_COLOCATE (did you mean KVTIDE_SGLANG_COLOCATED?)",) == found.unknown


def test_a_python_without_a_parser_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 has none; the package tomli serves as well."""
    known = importlib.import_module

    def without(*missing: str) -> Any:
        def find(name: str) -> Any:
            if name in missing:
                raise ImportError(name)
            return known("tomllib" if name == "tomli" else name)

        return find

    found = {"KVTIDE_CONFIG": "/nowhere"}
    monkeypatch.setattr(importlib, "import_module", without("tomllib"))
    with pytest.raises(UsageError, match="can't be read"):
        read_settings(found)
    monkeypatch.setattr(importlib, "import_module", without("tomllib", "tomli"))
    with pytest.raises(UsageError, match=r"needs Python 3\.11, or the package tomli"):
        read_settings(found)
