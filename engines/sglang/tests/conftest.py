"""SGLang as it is without an accelerator and without its kernels."""

from __future__ import annotations

import sys

import pytest

if "sgl_kernel" not in sys.modules:
    pytest.exit("SGLang's tests need its environment: run `make test-sglang`", returncode=4)

FIRST = ("_server.py", "doctor", "round_trips", "docs", "npu", "metrics")
"""In the names of the files that take longest, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes long, so that no process is left with it when the others are done."""
    items.sort(key=lambda item: [part not in item.path.name for part in FIRST])


@pytest.fixture(scope="session", autouse=True)
def parallel_context() -> None:
    """A server sets these from its arguments; pools of latents can't be built without."""
    # Not at the top: the process that hands out tests needs nothing of SGLang.
    from sglang.srt.runtime_context import get_parallel

    get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
