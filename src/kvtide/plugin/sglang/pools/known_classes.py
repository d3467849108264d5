"""Lists all classes of KV pools and recurrent state in the installed SGLang: does kvtide move them?

`kvtide doctor --sglang` shows them. kvtide leaves a pool of an unknown class to SGLang; here such a
class is found before a server starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.plugin.census import PoolClass, PoolKinds, census
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.pools.describe import DESCRIBERS
from kvtide.plugin.sglang.pools.recurrent_state import STATE_POOLS
from kvtide.plugin.sglang.pools.subject import NeverMoved
from kvtide.plugin.source import Source

ROOTS = ("KVCache", "MambaPool", "CompressStatePool")
"""Pools are these classes, their subclasses, and classes that define a copy method."""

COPY_METHODS = ("get_cpu_copy", "get_cpu_slots")
"""The second method is for state in the rows of a MambaPool."""

ABSTRACT: Mapping[str, str] = {
    "KVCache": "what all pools derive from",
    "BaseSWAKVPool": "what pools with sliding windows derive from",
    "SlotIndexedState": "what state in a MambaPool's rows has in common",
}
"""Abstract classes, and their purpose."""

WITHIN: Mapping[str, str] = {
    "DeepSeekV4SingleKVPool": "DeepSeekV4TokenToKVPool",
    "DeepSeekV4UniformFP8KVPool": "DeepSeekV4TokenToKVPool",
    "DeepSeekV4IndexerPool": "DeepSeekV4TokenToKVPool",
    "DeepSeekV4UnifiedKVPool": "DeepSeekV4TokenToKVPool",
    "HiSparseC4DevicePool": "DeepSeekV4TokenToKVPool",
    "CompressStatePool": "DeepSeekV4TokenToKVPool",
    "NPUDeepSeekV4SingleKVPool": "DSV4NPUTokenToKVPool",
    "NPUDeepSeekV4IndexerPool": "DSV4NPUTokenToKVPool",
    "NPUCompressStatePool": "DSV4NPUTokenToKVPool",
    "ShortConvPool": "MambaPool",
    "NGramPool": "MambaPool",
}
"""Classes whose objects are inside a pool of another class, which describes them."""


def known_classes(source: Source | None = None) -> list[PoolClass]:
    """All classes of pools by name, in `source` or in the installed SGLang.

    Raises ModuleNotFoundError if SGLang isn't installed.
    """
    refused = {
        name: describer.reason
        for name, describer in DESCRIBERS.items()
        if isinstance(describer, NeverMoved)
    }
    kinds = PoolKinds(
        roots=ROOTS,
        copy_methods=COPY_METHODS,
        allocators="BaseTokenToKVPoolAllocator",
        moved={*DESCRIBERS, *STATE_POOLS} - set(refused),
        refused=refused,
        within=WITHIN,
        abstract=ABSTRACT,
    )
    return census(source or SGLANG.source(), SGLANG, kinds)
