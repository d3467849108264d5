"""The attributes that kvtide reads exist in the source of the installed SGLang."""

from __future__ import annotations

import pytest

from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.reads import SGLANG_READS
from kvtide.plugin.source import Source, gone


@pytest.fixture(scope="module")
def installed() -> Source:
    """The source of the installed SGLang."""
    return SGLANG.source()


def test_all_attributes_of_the_tables_exist(installed: Source) -> None:
    """An attribute belongs to the named class, or to one of its bases."""
    assert len(SGLANG_READS.tables()) >= 6, "the modules that describe pools have tables"
    lost = gone(installed, SGLANG_READS.tables())
    assert not lost, f"this SGLang has no longer: {', '.join(lost)}"


def test_all_missing_attributes_are_named_at_once(installed: Source) -> None:
    """A missing class and missing attributes are named."""
    table = {
        "MHATokenToKVPool": ("k_buffer", "k_bufer?", "page_size"),
        "MHATokenToKVPoolMX7": ("k_buffer",),
        "MLATokenToKVPool": ("k_buffer", "kv_buffer"),
    }
    lost = ["MHATokenToKVPool.k_bufer", "class MHATokenToKVPoolMX7", "MLATokenToKVPool.k_buffer"]
    assert lost == gone(installed, [table])
