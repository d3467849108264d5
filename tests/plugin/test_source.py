"""What the source of a package says about its classes, and which tables a plugin has."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtide.plugin.sglang
from kvtide.plugin.sglang.reads import SGLANG_READS
from kvtide.plugin.source import Source, gone

WRITTEN = """
class Base:
    inherited: int

class Pool(other.Base, Generic[T]):
    field: int = 0
    plain = 1

    def __init__(this, size):
        this.size = size
        this.first, (this.second, third) = pair()
        size.stranger = 1
        for name in ("left", "right"):
            setattr(this, name, 0)
        setattr(this, "literal", this.read)
        setattr(size, "foreign", 0)

    @property
    def derived(self): ...

    class Nested:
        inner = 1
"""


@pytest.mark.parametrize(
    ("name", "has_it"),
    [
        *((name, True) for name in ("inherited", "field", "plain", "size", "first", "second")),
        *((name, True) for name in ("left", "right", "literal", "derived", "Nested")),
        *((name, False) for name in ("stranger", "third", "read", "foreign", "inner", "name")),
    ],
)
def test_attributes_are_what_a_class_defines_or_sets_on_itself(
    tmp_path: Path, name: str, has_it: bool
) -> None:
    """An attribute that the class only reads, or sets on another object, doesn't count."""
    (tmp_path / "pools.py").write_text(WRITTEN)
    assert ([] if has_it else [f"Pool.{name}"]) == gone(Source(tmp_path), [{"Pool": (name,)}])


def test_a_package_that_is_not_installed_is_named() -> None:
    """The error is the one that an import would raise."""
    with pytest.raises(ModuleNotFoundError, match="no_such_engine isn't installed"):
        Source.of_installed("no_such_engine")


def test_the_tables_of_all_folders_of_a_plugin_are_found() -> None:
    """A table in a folder that isn't searched would never be checked."""
    folder = Path(kvtide.plugin.sglang.__file__).parent
    texts = [path.read_text("utf-8") for path in folder.rglob("*.py")]
    written = sum("\nREADS: Table" in text for text in texts)
    assert written == len({id(table) for table in SGLANG_READS.tables()})
