"""Modules in vLLM's place, so that what derives from its classes can be imported without it.

Each name that is asked for is a class, and each attribute of such a class is its own name. The
classes whose behaviour counts are here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


class _Named(type):
    """A class with any attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A module with any class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


class SecondaryTierManager:
    """What vLLM's does for those that derive from it: it knows how long a row is."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        self.block_size_bytes = view.nbytes // len(view)


@dataclass
class JobResult:
    """How a move ended."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float = 0.0
    transfer_bytes: int = 0


_NAMES = (
    "vllm",
    "vllm.platforms",
    *(
        f"vllm.{name}"
        for name in ("distributed", "v1", "v1.metrics", "v1.metrics.cache_hit_source")
    ),
    *(f"vllm.distributed.kv_transfer{name}" for name in ("", ".kv_connector", ".kv_connector.v1")),
    *(
        f"vllm.distributed.kv_transfer.kv_connector.v1.{name}"
        for name in ("base", "offloading", "offloading.common", "offloading.metrics")
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    *(f"vllm.v1.kv_offload{name}" for name in ("", ".base", ".tiering", ".tiering.base")),
)


@contextmanager
def stand_in_vllm() -> Iterator[None]:
    """Within, vLLM can be imported; what was imported with it is forgotten at the end."""
    before = dict(sys.modules)
    assert "vllm" not in before, "this environment has vLLM itself"
    for name in _NAMES:
        sys.modules[name] = _StandIn(name)
    base = sys.modules["vllm.v1.kv_offload.tiering.base"]
    base.SecondaryTierManager = SecondaryTierManager  # type: ignore[attr-defined]
    base.JobResult = JobResult  # type: ignore[attr-defined]
    platform = SimpleNamespace(get_device_name=lambda: "a machine")
    sys.modules["vllm.platforms"].current_platform = platform  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "vllm" or name.startswith("kvtide.plugin.vllm."):
                del sys.modules[name]
