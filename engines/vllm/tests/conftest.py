"""vLLM's engine for the CPU, in the process of the tests, and nothing from a network."""

from __future__ import annotations

import os

# vLLM reads these when it is imported. Its scheduler and its worker then run in this process.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
)
