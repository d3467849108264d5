"""SGLang on a machine without an accelerator and without its kernels."""

from __future__ import annotations

import sys

import pytest

if "sgl_kernel" not in sys.modules:
    pytest.exit("SGLang's tests need its environment: run `make test-sglang`", returncode=4)

FIRST = ("_server.py", "doctor", "round_trips", "docs", "npu", "metrics")
"""Parts of the names of the files that take longest, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest tests, so that no process runs them when the others are done."""
    items.sort(key=lambda item: [part not in item.path.name for part in FIRST])


@pytest.fixture(scope="session", autouse=True)
def parallel_context() -> None:
    """A server sets these from its arguments; without them no pool of latents can be built."""
    # Not at the top: the process that hands out tests doesn't need SGLang.
    from sglang.srt.runtime_context import get_parallel

    get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
