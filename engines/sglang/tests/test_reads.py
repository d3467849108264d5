"""What kvtide reads of SGLang's objects, against the text of the installed SGLang."""

from __future__ import annotations

import pytest

from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.reads import tables
from kvtide.plugin.source import Source, gone


@pytest.fixture(scope="module")
def installed() -> Source:
    """The text of the SGLang in this environment."""
    return SGLANG.source()


def test_all_that_is_read_is_where_the_tables_say(installed: Source) -> None:
    """By the name of its class, or of one that this derives from."""
    assert len(tables()) >= 6, "the modules that describe pools have tables"
    lost = gone(installed, tables())
    assert not lost, f"this SGLang has no longer: {', '.join(lost)}"


def test_what_is_gone_is_named_all_at_once(installed: Source) -> None:
    """A class that isn't there, and attributes that its classes don't have."""
    table = {
        "MHATokenToKVPool": ("k_buffer", "k_bufer?", "page_size"),
        "MHATokenToKVPoolMX7": ("k_buffer",),
        "MLATokenToKVPool": ("k_buffer", "kv_buffer"),
    }
    lost = ["MHATokenToKVPool.k_bufer", "class MHATokenToKVPoolMX7", "MLATokenToKVPool.k_buffer"]
    assert lost == gone(installed, [table])
