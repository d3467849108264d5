"""EngineOptions: how an engine is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from kvtide.errors import UsageError
from kvtide.integers import checked_integer, shown
from kvtide.tier.mooncake_settings import MooncakeSettings

_LEAST = {
    "kv_memory_bytes": 0,
    "host_memory_bytes": 0,
    "disk_memory_bytes": 0,
    "page_size": 1,
    "chunk_tokens": 1,
    "threads": 1,
    "max_running": 1,
}
_OPEN = ("kv_memory_bytes", "host_memory_bytes", "disk_memory_bytes", "threads")
"""The options that may be None."""


@final
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built; `page_size` and `chunk_tokens` in tokens.

    If `kv_memory_bytes` is None, the pool has room for what can run at once of the requests given
    to `build`, but takes at most half of the free memory. If `host_memory_bytes` is None, it is a
    quarter of the free memory. KV that has no room in host memory goes to files in `disk_dir`, if
    there is one, of at most `disk_memory_bytes` (None: a quarter of what is free there), and what
    has no room there to the Mooncake store of `mooncake`. Only an engine of the same `salt`, a
    tenant's secret, finds it there. If `threads` is None, torch's thread count stays. `keep_logits`
    keeps a hash of the logits of each token.

    `on_pressure` says what happens when the pool is full: the newest request's KV moves to host
    memory (`offload`) or is computed again later (`recompute`). With `wait` nothing is ever
    retracted: a request starts only when its longest answer has room too.

    With `share_prefixes` requests that begin with the same tokens share the KV of these tokens.
    """

    kv_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    disk_dir: Path | None = None
    disk_memory_bytes: int | None = None
    mooncake: MooncakeSettings | None = None
    salt: bytes = field(default=b"", repr=False)
    on_pressure: str = "offload"
    page_size: int = 16
    chunk_tokens: int = 256
    threads: int | None = None
    exact: bool = True
    device: str = "cpu"
    max_running: int = 64
    keep_logits: bool = False
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        """Raises UsageError for an invalid value; `parse_size` converts a size such as `24MiB`."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPEN:
                checked_integer(value, f"engine: {name}", least=least, error=UsageError)
        if self.on_pressure not in ("offload", "recompute", "wait"):
            raise UsageError(
                "engine: on_pressure must be 'offload', 'recompute' or 'wait', not "
                f"{shown(self.on_pressure)}"
            )
