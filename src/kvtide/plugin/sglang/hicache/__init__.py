"""A HiCache storage backend for SGLang: pages of KV in kvtide's tiers, each sealed and verified.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvtide", "module_path": "kvtide.plugin.sglang.hicache",
      "class_name": "KvtideStorage", "interface_v1": 1, "disk_dir": "/data/kv"}'

backend    SGLang's calls: each ends before a deadline, and none raises
moves      the pages of a call, several at a time, between SGLang's memory and the tiers
pages      a host pool of SGLang's, page by page
identity   which page may stand for which
updates    how often the weights have changed; hooks: where SGLang changes them
settings   what an operator sets; places: the tiers of a rank, by these settings
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # SGLang looks this name up. The hooks, which are registered in each process, don't need it.
    if name != "KvtideStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtide.plugin.sglang.hicache.backend import storage_class

    return storage_class()
