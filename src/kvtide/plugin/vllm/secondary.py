"""KvtideTier: kvtide's disk and Mooncake tiers below vLLM's own primary tier, checked.

KvtideTierConnector is vLLM's OffloadingConnector as it is; it tells the tier which model it serves,
since vLLM tells a tier only the model's path. What lies in vLLM's host memory has no checksums.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from secrets import token_hex
from typing import Any, ClassVar, final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.chunks import ChunkMoves, Row, layout_of
from kvtide.plugin.vllm.connector import refuse_what_is_inexact
from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.lookups import Lookups
from kvtide.plugin.vllm.messages import COUNTS, names_of
from kvtide.plugin.vllm.orphan import end_with_parent
from kvtide.plugin.vllm.reads import VLLM_READS
from kvtide.plugin.vllm.settings import (
    CONNECTOR,
    TIER,
    TIER_CONNECTOR,
    OffloadSettings,
    read_tier_settings,
)
from kvtide.plugin.vllm.stack import TierStack
from kvtide.plugin.vllm.tiers_below import open_below
from kvtide.plugin.vllm.timely import TimelyThreads
from kvtide.tier import Namespace

logger = logging.getLogger(__name__)

READS: Table = {
    "SecondaryTierManager": (
        *("lookup", "submit_store", "submit_load", "get_finished_jobs", "has_pending_work"),
        *("on_new_request", "on_request_finished", "on_schedule_end", "drain_jobs", "shutdown"),
        *("build_metric_definitions", "get_stats"),
    ),
    "JobResult": ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    "OffloadingSpec": ("config",),
    "OffloadingConfig": ("groups", "cache", "kv_cache_layout"),
    "OffloadingGroupConfig": ("tokens_per_block", "layer_names"),
    "OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "VllmConfig": ("attention_config",),
    "KVCacheConfig": ("kv_cache_groups",),
    "KVCacheGroupSpec": ("kv_cache_spec",),
    "Medium": ("STORAGE",),
}
"""What is read and called of vLLM's tiers; but for TransferJob, whose name two classes have."""

_THREADS = 16
_DEADLINE_S = 5.0
_CONFIG: ContextVar[Any] = ContextVar("kvtide_vllm_config", default=None)
"""The configurations of the engine whose tiers are being made, and of its caches."""


class KvtideTierConnector(OffloadingConnector):
    """vLLM's own connector, beside which a tier knows the model."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises Refused for what can't be told apart, and what the tier raises."""
        VLLM_READS.refuse_if_moved()
        refuse_what_is_inexact(vllm_config)
        if vllm_config.lora_config is not None:
            raise Refused(
                "vLLM tells a tier nothing of adapters; serve without --enable-lora, or with "
                f'"kv_connector": "{CONNECTOR}", which knows them'
            )
        before = _CONFIG.set((vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _CONFIG.reset(before)


@final
class KvtideTier(SecondaryTierManager):
    """What vLLM makes in its scheduler for `{"type": "kvtide", "disk_dir": …}`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **entry: Any,
    ) -> None:
        """`entry` has kvtide's settings. Raises Refused, UsageError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings, configs = read_tier_settings(entry), _CONFIG.get()
        if configs is None:
            raise Refused(
                f'the secondary tier {TIER!r} needs "kv_connector": "{TIER_CONNECTOR}", since '
                "vLLM's own connector doesn't tell it the model's weights"
            )
        row_bytes = self.block_size_bytes
        self._primary = primary_kv_view.cast("B")
        vllm_config, caches = configs
        self._namespace = namespace_of_chunks(
            vllm_config, caches, offloading_spec.config, settings, row_bytes
        )
        self._below = open_below(settings, 0, 1)
        self._stack = TierStack(self._below.tiers)
        readers, writers = (TimelyThreads(_THREADS, _DEADLINE_S) for _ in range(2))
        self._moves = ChunkMoves(self._stack, row_bytes, readers, writers)
        self._lookups = Lookups(self._stack, TimelyThreads(1, _DEADLINE_S))
        end_with_parent()

    # ---- what vLLM calls -----------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk is there, or that a later step tells."""
        found = self._lookups.ask(req_context.req_id, key, self._name_of(key))
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begins to write chunks."""
        self._moves.store(job_metadata.job_id, self._rows_of(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Begins to read chunks."""
        self._moves.load(job_metadata.job_id, self._rows_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The moves that have ended. A chunk that didn't come isn't asked for again."""
        for ended in self._moves.take_ended():
            self._lookups.mark_missing(ended.missed)
            yield JobResult(
                ended.job_id,
                not ended.missed,
                successful_keys=ended.moved or None,
                transfer_time=ended.seconds,
                transfer_bytes=ended.size_bytes,
            )

    def has_pending_work(self) -> bool:
        """Whether moves are under way."""
        return bool(self._moves)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Chunks are written as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Nobody waits for this request's look-ups any more."""
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """The look-ups of this step begin."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Blocks until no move touches vLLM's memory. What was saved before isn't used any more.

        vLLM calls this when its cache is reset, as after new weights in a running engine.
        """
        self._moves.drain()
        fresh = f"{self._namespace.engine} {token_hex(16)}"
        self._namespace = replace(self._namespace, engine=fresh)

    def shutdown(self) -> None:
        """Waits a while for moves, and gives the folder back. Repeatable."""
        self._lookups.close()
        self._moves.close()
        self._below.close()
        self._primary.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """The metrics that `get_stats` gives values for."""
        return {
            name: OffloadingCounterMetadata(documentation=text)
            for name, text in zip(names_of(COUNTS), COUNTS.values(), strict=True)
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What has happened since the last call, for vLLM's metrics."""
        counts = self._moves.take_counts()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(*names_of([name]), count)
        return stats

    # ---- chunks --------------------------------------------------------------------------

    def _name_of(self, key: bytes) -> str:
        return self._namespace.key_of(key.hex())

    def _rows_of(self, job: Any) -> list[Row]:
        size = self.block_size_bytes
        numbers = (int(number) for number in job.chunk_ids)
        return [
            (key, self._name_of(key), self._primary[number * size : (number + 1) * size])
            for key, number in zip(job.keys, numbers, strict=True)
        ]


def namespace_of_chunks(
    vllm_config: Any, kv_cache_config: Any, config: Any, settings: OffloadSettings, row_bytes: int
) -> Namespace:
    """The namespace of chunks, each of which has the blocks of all ranks."""
    groups = [f"{group.tokens_per_block} {group.layer_names}" for group in config.groups]
    cache = config.cache
    beside = [
        *(str(cache.tokens_per_hash), str(cache.blocks_per_chunk), str(config.kv_cache_layout)),
        # The layers, and so their backends and tensors, may be in other processes.
        *(str(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
        *(str(vllm_config.attention_config), str(current_platform.get_device_name())),
    ]
    layouts = [layout_of(row_bytes), *groups]
    return namespace_of(
        vllm_config, settings, layouts, current_platform, is_durable=True, beside=beside
    )
