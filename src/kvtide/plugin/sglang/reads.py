"""The names that kvtide reads of SGLang."""

from __future__ import annotations

from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.sglang.package import SGLANG

_PACKAGES = tuple(
    f"kvtide.plugin.sglang{below}" for below in ("", ".pools", ".ordinary", ".hicache")
)
SGLANG_READS = EngineReads(SGLANG, _PACKAGES, "kvtide doctor --sglang")
