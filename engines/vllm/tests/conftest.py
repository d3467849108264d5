"""vLLM's engine for the CPU, in the process of the tests, and nothing from a network."""

from __future__ import annotations

import os

import pytest
from small_models import HAS_FP8

# vLLM reads these when it is imported. Its scheduler and its worker then run in this process.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the tests that take long, so that no process waits for another at the end."""
    first = ("test_serve.py", "test_host_and_disk.py", "test_ranks.py")
    places = {name: place for place, name in enumerate(first)}
    items.sort(key=lambda item: places.get(item.path.name, len(first)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says aloud what this machine can't try."""
    if not HAS_FP8:
        terminalreporter.write_line(
            "********** NOT TESTED: KV in fp8, for which vLLM needs AVX-512 **********"
        )
