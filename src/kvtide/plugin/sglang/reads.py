"""The names that kvtide reads of SGLang, and whether the installed version has them."""

from __future__ import annotations

from kvtide.plugin.reader import Table
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.source import gone
from kvtide.plugin.versions import refuse_if_gone, tables_in

PACKAGES = tuple(
    f"kvtide.plugin.sglang{below}" for below in ("", ".pools", ".ordinary", ".hicache")
)
"""Packages whose modules list in `READS` what they read of SGLang."""


def tables() -> list[Table]:
    """The `READS` of all modules of the plugin that have one."""
    return tables_in(PACKAGES)


def what_is_gone() -> list[str]:
    """The names that the installed SGLang doesn't define: `Class.attribute`, or `class Class`.

    Takes two seconds. Raises ImportError without SGLang, and OSError, ValueError or SyntaxError for
    source that can't be read.
    """
    return gone(SGLANG.source(), tables())


def refuse_if_moved() -> None:
    """Raises Refused if this SGLang is untested and lacks something that kvtide reads."""
    refuse_if_gone(
        SGLANG.title,
        SGLANG.version,
        SGLANG.tested,
        what_is_gone,
        names_all="kvtide doctor --sglang",
    )
