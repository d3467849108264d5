"""vLLM's package, and the versions with which kvtide was tested."""

from __future__ import annotations

from kvtide.plugin.package import EnginePackage

VLLM = EnginePackage("vLLM", "vllm", tested=("0.32.0", "0.32.0+cpu"))
"""vLLM's package. kvtide derives from its classes, and so needs no table of where they are."""
