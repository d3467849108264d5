"""The names that kvtide reads of vLLM."""

from __future__ import annotations

from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.vllm.package import VLLM

VLLM_READS = EngineReads(VLLM, ("kvtide.plugin.vllm",), "kvtide doctor --vllm")
