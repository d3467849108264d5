"""kvtide knows every class of pools in the installed SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.plugin.census import PoolClass
from kvtide.plugin.sglang.package import HOMES, SGLANG
from kvtide.plugin.sglang.pools.describe import DESCRIBERS
from kvtide.plugin.sglang.pools.known_classes import ABSTRACT, WITHIN, known_classes
from kvtide.plugin.source import Source


@pytest.fixture(scope="module")
def found() -> list[PoolClass]:
    """All classes of pools of the installed SGLang."""
    return known_classes()


def test_no_class_of_pools_is_unknown(found: list[PoolClass]) -> None:
    """Each class is moved, refused with a reason, or a part of one that is moved."""
    unknown = [f"{kind.name} ({kind.file})" for kind in found if kind.verdict == "unknown"]
    assert not unknown, f"kvtide doesn't know {', '.join(unknown)}"


def test_all_classes_that_kvtide_names_exist(found: list[PoolClass]) -> None:
    """A describer of a class that SGLang lacks would never be used."""
    named = {*DESCRIBERS, *ABSTRACT, *WITHIN, *WITHIN.values()}
    assert set() == named - {kind.name for kind in found}


def test_classes_that_are_not_moved_have_a_reason(found: list[PoolClass]) -> None:
    """A reader of the list has no other explanation."""
    silent = [kind.name for kind in found if kind.verdict != "known" and not kind.reason]
    assert [] == silent


POOLS = {
    "mem_cache/memory_pool.py": """
class KVCache: ...
class MHATokenToKVPool(KVCache): ...
class Allocator(BaseTokenToKVPoolAllocator):
    def get_cpu_copy(self): ...
class NoPool:
    def get_cpu_copies(self): ...
""",
    "later.py": """
class NextPool(
    memory_pool.MHATokenToKVPool
): ...
class AfterThat(NextPool): ...
class StateOfItsOwn:
    def get_cpu_copy(self): ...
""",
    "vendor.py": """
class MHATokenToKVPool(memory_pool.MHATokenToKVPool):
    one_buffer_more = None
""",
}


def test_a_class_that_a_later_release_adds_is_unknown(tmp_path: Path) -> None:
    """The class derives from a pool, directly or not, or has copy methods."""
    for name, text in POOLS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    unknown = [
        (kind.name, kind.file)
        for kind in known_classes(Source(tmp_path))
        if kind.verdict == "unknown"
    ]
    assert [
        ("AfterThat", "later.py"),
        ("MHATokenToKVPool", "vendor.py"),
        ("NextPool", "later.py"),
        ("StateOfItsOwn", "later.py"),
    ] == unknown


def test_each_class_is_in_the_module_that_kvtide_expects() -> None:
    """Its name appears once, or it would be ambiguous."""
    source = SGLANG.source()
    files = {name: [kind.file for kind in source.named(name)] for names in HOMES.values()
             for name in names}  # fmt: skip
    expected = {name: [f"{module.replace('.', '/')}.py"] for module, names in HOMES.items()
                for name in names}  # fmt: skip
    assert expected == files
