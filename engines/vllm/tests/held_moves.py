"""Moves between device and host memory that end when a test says so, as on an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from vllm_engine import BLOCK_TOKENS, Engine

BLOCKS = 3
"""How many whole blocks each prompt fills."""
PROMPT, OTHER = (
    Random(seed).choices(range(1000, 40_000), k=BLOCKS * BLOCK_TOKENS + 20) for seed in (1, 2)
)
DISK_BYTES = 64 << 20


def settings_of(folder: Path, host_bytes: int) -> dict[str, str]:
    """An operator's settings."""
    return {
        "host_memory": str(host_bytes),
        "disk_dir": str(folder),
        "disk_memory": str(DISK_BYTES),
    }


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """Lets moves begin, and not end before the event is set."""
    store, go = engine.store, threading.Event()
    store._at_once = False
    store._groups[0].pool.device._queue.submit(go.wait)
    try:
        yield go
    finally:
        go.set()
        store._at_once = True
