"""All classes of KV pools and of recurrent state in the installed SGLang, and what becomes of each.

`kvtide doctor --sglang` shows them. A class that kvtide doesn't know is left to SGLang when a
server starts with it; here it is found before.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.plugin.census import PoolClass, PoolKinds, census
from kvtide.plugin.sglang.homes import SGLANG
from kvtide.plugin.sglang.pools.describe import DESCRIBERS
from kvtide.plugin.sglang.pools.recurrent_state import STATE_POOLS
from kvtide.plugin.sglang.pools.subject import NeverMoved
from kvtide.plugin.source import Source

ROOTS = ("KVCache", "MambaPool", "CompressStatePool")
"""Pools are these, all that derive from them, and what has a copy method of its own."""

COPY_METHODS = ("get_cpu_copy", "get_cpu_slots")
"""The second one is that of state whose rows go with a MambaPool's."""

ABSTRACT: Mapping[str, str] = {
    "KVCache": "what all pools derive from",
    "BaseSWAKVPool": "what pools with sliding windows derive from",
    "SlotIndexedState": "what state in a MambaPool's rows has in common",
}
"""Classes without objects of their own, and what they are for."""

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
"""Classes whose objects are part of another's, which describes them."""


def known_classes(source: Source | None = None) -> list[PoolClass]:
    """Each class of pools, by name; of `source`, or of the SGLang in this environment.

    Raises ModuleNotFoundError where there is none.
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
