"""All classes of KV pools and of recurrent state in the installed SGLang, and what becomes of each.

`kvtide doctor --sglang` shows them. A class that kvtide doesn't know is left to SGLang when a
server starts with it; here it is found before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from kvtide.plugin.sglang.homes import is_at_home
from kvtide.plugin.sglang.pools.describe import DESCRIBERS
from kvtide.plugin.sglang.pools.recurrent_state import STATE_POOLS
from kvtide.plugin.sglang.pools.subject import NeverMoved
from kvtide.plugin.source import Source, SourceClass

ROOTS = ("KVCache", "MambaPool", "CompressStatePool")
"""Those and all that derive from them are pools, and so is what has a copy method of its own."""

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


@final
@dataclass(frozen=True, slots=True)
class PoolClass:
    """A class of SGLang's, in `file` below `sglang/srt`.

    `verdict` is `known`, `refused` (whatever the pool is like), `within` or `abstract` (never a
    server's pool), or `unknown`; `reason` says why, or of which pool it is a part.
    """

    name: str
    file: str
    verdict: str
    reason: str = ""


def census(source: Source | None = None) -> list[PoolClass]:
    """Each class of pools, by name; of `source`, or of the SGLang in this environment.

    Raises ModuleNotFoundError where there is none.
    """
    source = source or Source.of_installed()
    verdicts = [_verdict(one) for one in _pools(source)]
    return sorted(verdicts, key=lambda one: (one.name, one.file))


def _pools(source: Source) -> list[SourceClass]:
    """What is a pool by what it derives from, or by the copy that it makes of some of its rows."""
    allocators = "BaseTokenToKVPoolAllocator"
    found = [one for name in COPY_METHODS for one in source.defining(name)]
    names = {*ROOTS, *WITHIN, *(one.name for one in found)}
    found += [one for name in sorted(names) for one in (*source.named(name), *source.derived(name))]
    hand_out = {allocators, *(one.name for one in source.derived(allocators))}
    distinct = {(one.name, one.file): one for one in found if one.name not in hand_out}
    return list(distinct.values())


def _verdict(found: SourceClass) -> PoolClass:
    name, file = found.name, found.file
    if not is_at_home(name, file):
        return PoolClass(name, file, "unknown")
    describer = DESCRIBERS.get(name)
    if isinstance(describer, NeverMoved):
        return PoolClass(name, file, "refused", describer.reason)
    if describer is not None or name in STATE_POOLS:
        return PoolClass(name, file, "known")
    if name in WITHIN:
        return PoolClass(name, file, "within", f"part of {WITHIN[name]}")
    if name in ABSTRACT:
        return PoolClass(name, file, "abstract", ABSTRACT[name])
    return PoolClass(name, file, "unknown")
