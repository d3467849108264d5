"""The options of an engine are checked when they are given."""

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
def test_invalid_options_are_refused(name: str, value: object) -> None:
    """The error names the option at once, before a model is loaded."""
    with pytest.raises(UsageError, match=f"engine: {name} must be "):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


def test_only_three_options_may_be_none() -> None:
    """None asks for the default; every other option needs a value."""
    EngineOptions(kv_memory_bytes=None, host_memory_bytes=None, threads=None)
    with pytest.raises(UsageError, match="engine: page_size must be an integer from 1, not None"):
        EngineOptions(page_size=None)  # type: ignore[arg-type]


def test_a_tenants_secret_is_not_shown() -> None:
    """A log that has the options must not have the secret."""
    assert "sesame" not in repr(EngineOptions(salt=b"sesame"))
