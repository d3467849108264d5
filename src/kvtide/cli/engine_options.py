"""Makes the options of an engine from those of a command that has one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvtide.cli.options import MemoryOptions, ModelOptions
from kvtide.errors import UsageError
from kvtide.sizes import parse_memory, parse_size
from kvtide.tier import MooncakeSettings
from kvtide.tier.namespace import salt_of

if TYPE_CHECKING:
    from kvtide.serve.options import EngineOptions


def engine_options(
    model: ModelOptions, memory: MemoryOptions, *, keep_logits: bool
) -> EngineOptions:
    """The options of an engine. Raises UsageError for an invalid one."""
    from kvtide.serve.options import EngineOptions

    return EngineOptions(
        kv_memory_bytes=_parse_kv_memory(memory.kv_memory),
        host_memory_bytes=_parse_host_memory(memory.host_memory),
        disk_dir=memory.disk_dir,
        disk_memory_bytes=_disk_bytes(memory),
        mooncake=_parse_mooncake(memory.mooncake),
        salt=salt_of(os.environ),
        on_pressure=memory.on_pressure.value,
        page_size=memory.page_size,
        chunk_tokens=memory.chunk_tokens,
        threads=model.threads,
        exact=model.exact,
        device=model.device,
        max_running=memory.max_running,
        keep_logits=keep_logits,
    )


def _disk_bytes(memory: MemoryOptions) -> int | None:
    if memory.disk_memory is None:
        return None
    if memory.disk_dir is None:
        raise UsageError("--disk-memory is the limit of a folder; name it with --disk-dir")
    return parse_memory(memory.disk_memory, name="--disk-memory")


def _parse_mooncake(text: str | None) -> MooncakeSettings | None:
    return None if text is None else MooncakeSettings.parse(text, name="--mooncake")


def _parse_kv_memory(text: str | None) -> int | None:
    size_bytes = None if text is None else parse_size(text, name="--kv-memory")
    if size_bytes == 0:
        raise UsageError(f"--kv-memory: {text} is too small; give a size of one page or more")
    return size_bytes


def _parse_host_memory(text: str | None) -> int | None:
    return None if text is None else parse_memory(text, name="--host-memory")
