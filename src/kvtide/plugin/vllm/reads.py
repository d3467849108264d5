"""The names that kvtide reads of vLLM, and whether the installed version has them."""

from __future__ import annotations

from kvtide.plugin.reader import Table
from kvtide.plugin.source import gone
from kvtide.plugin.versions import refuse_if_gone, tables_in
from kvtide.plugin.vllm.package import VLLM

PACKAGES = ("kvtide.plugin.vllm",)
"""Packages whose modules list in `READS` what they read of vLLM."""


def tables() -> list[Table]:
    """The `READS` of all modules of the plugin that have one. Imports vLLM."""
    return tables_in(PACKAGES)


def what_is_gone() -> list[str]:
    """The names that the installed vLLM doesn't define: `Class.attribute`, or `class Class`.

    Takes some seconds. Raises ImportError without vLLM, and OSError, ValueError or SyntaxError for
    source that can't be read.
    """
    return gone(VLLM.source(), tables())


def refuse_if_moved() -> None:
    """Raises Refused if this vLLM is untested and lacks something that kvtide reads."""
    refuse_if_gone(
        VLLM.title,
        VLLM.version,
        VLLM.tested,
        what_is_gone,
        names_all='python -c "from kvtide.plugin.vllm import reads; print(reads.what_is_gone())"',
    )
