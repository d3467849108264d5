"""Real servers whose models have more than keys and values find their pages in the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hicache_server import PAGES, cached, outputs, prompts, run_hicache, step
from ordinary_case import make_model

FIRST = prompts(3)
LONGER = [
    {**request, "input_ids": [*request["input_ids"], *range(20, 40)]} for request in prompts(3)
]
"""A recurrent state is kept where a prompt ends, so only longer prompts find it."""

KERNEL = {"hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"}
SERVERS: dict[str, dict[str, Any]] = {
    "windows": {},
    "latents": KERNEL,
    "states": {**KERNEL, "page_size": 1},
}
"""Sliding windows, DeepSeek's latents, and convolution state, whose pages are of one token."""


@pytest.mark.parametrize("name", SERVERS)
def test_pages_of_all_pools_come_back(name: str, tmp_path: Path) -> None:
    """What has its pages isn't computed again; the answers are those without the storage."""
    make_model(tmp_path / "model", name)
    run = run_hicache(
        tmp_path / "run",
        tmp_path / "model",
        tmp_path / "kv",
        [
            step("asked", requests=FIRST),
            step("asked", requests=LONGER),
            step("fault", flag=str(tmp_path / "run" / "fault"), kind="hang"),
            step("asked", requests=LONGER),
        ],
        server=SERVERS[name],
        storage={"deadline_s": 4},
    )
    assert run.exit_code == 0, run.log[-8000:]
    first, found, _, computed = run.results
    assert [0] * len(FIRST) == cached(first) == cached(computed)
    assert [PAGES] * len(FIRST) == cached(found)
    assert outputs(computed) == outputs(found)
