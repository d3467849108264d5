"""Invalid options of an engine."""

from __future__ import annotations

import pytest

from kvtide.errors import UsageError
from kvtide.serve.options import EngineOptions


@pytest.mark.parametrize(
    "name",
    [
        *("kv_memory_bytes", "host_memory_bytes", "page_size", "chunk_tokens", "threads"),
        *("max_running", "on_pressure"),
    ],
)
@pytest.mark.parametrize("value", ["1MiB", 4096.7, -1, True, "ofload"])
def test_options_that_cannot_be_meant_are_refused_when_they_are_given(
    name: str, value: object
) -> None:
    """Not when a model is loaded already, nor by doing something else."""
    with pytest.raises(UsageError, match=f"engine: {name} must be "):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


def test_options_that_may_be_left_open_are_none() -> None:
    """The others have a value."""
    EngineOptions(kv_memory_bytes=None, host_memory_bytes=None, threads=None)
    with pytest.raises(UsageError, match="engine: page_size must be an integer from 1, not None"):
        EngineOptions(page_size=None)  # type: ignore[arg-type]
