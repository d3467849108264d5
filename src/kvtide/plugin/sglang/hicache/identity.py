"""Identity: which page of KV may stand for which, and so the keys of pages in the tiers."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, final

from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.sglang.hicache.pages import HostPages
from kvtide.plugin.sglang.hicache.served_model import ServedModel
from kvtide.tier.namespace import Namespace, salt_of

READS: Table = {
    "HiCacheStorageConfig": (
        *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"),
        *("is_mla_model", "is_storage_writer", "model_name?", "extra_config?"),
    ),
}

_REPLICATED = {
    *("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool"),
    *("DeepSeekV4StateHostPool", "LogicalHostPool"),
}
"""Pools that have the same bytes on all tensor-parallel ranks of a server that SGLang calls MLA's.
A pool of another class has a rank's share, such as recurrent state or a draft model's heads."""


@final
class Identity:
    """Makes a rank's keys. All that decides a page's bytes is in them."""

    def __init__(self, config: Any, server: ServedModel) -> None:
        """`config` is SGLang's HiCacheStorageConfig."""
        self._reads = reads = Reader(config, READS)
        self.server = server
        self.tp_size = int(reads["tp_size"])
        self.is_writer = bool(reads["is_storage_writer"])
        stage = f"pp{reads['pp_rank']}of{reads['pp_size']}"
        context = f"cp{reads['attn_cp_rank']}of{reads['attn_cp_size']}"
        self.shard = f"tp{reads['tp_rank']}of{reads['tp_size']}-{stage}-{context}"
        """The rank's part of the KV, in words for a folder's name."""
        self.writers_shard = f"tp0of{reads['tp_size']}-{stage}-{context}"
        """The same of the rank that writes what all ranks have."""
        self._everybody = f"all-{stage}-{context}"
        self._namespace = lru_cache(maxsize=64)(self._make_namespace)

    def is_replicated(self, pages: HostPages) -> bool:
        """Whether all tensor-parallel ranks have the same bytes in this pool, and one writes."""
        return bool(self._reads["is_mla_model"]) and not _REPLICATED.isdisjoint(pages.kinds)

    def keys_of(self, pages: HostPages, names: list[str]) -> list[str]:
        """The keys of pages in the tiers; `names` are SGLang's, hashes of chains of tokens."""
        namespace = self._namespace(pages, self.server.revision)
        return [namespace.key_of(name) for name in names]

    def _make_namespace(self, pages: HostPages, revision: str) -> Namespace:
        return Namespace(
            model=self._reads["model_name"] or "",
            weights=revision,
            layout=pages.fingerprint,
            engine=self.server.engine,
            stage=f"{self._reads['pp_rank']}/{self._reads['pp_size']}",
            rank=self._everybody if self.is_replicated(pages) else self.shard,
            salt=salt_of(os.environ),
        )
