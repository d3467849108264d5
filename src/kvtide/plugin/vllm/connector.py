"""KvtideConnector: vLLM's OffloadingConnector, with loads that may fail.

vLLM's connector ends the engine when a load fails. This one reports the request, which vLLM then
computes again. It also carries orders to the workers and their reports back.

    scheduler   build_connector_meta → Orders            update_connector_output ← BlockReport
    worker      handle_preemptions   ← Orders            build_connector_worker_meta → BlockReport
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast, final

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.adapters import CHANGES_ALLOWED, Adapters, changes_are_allowed
from kvtide.plugin.vllm.lookups import Lookups
from kvtide.plugin.vllm.messages import BlockReport, Orders, Start
from kvtide.plugin.vllm.open_store import OpenStore, open_store
from kvtide.plugin.vllm.orphan import end_with_parent
from kvtide.plugin.vllm.reads import VLLM_READS
from kvtide.plugin.vllm.resumes import ResumeCounts
from kvtide.plugin.vllm.settings import SPEC, read_settings
from kvtide.plugin.vllm.spec import KvtideManager, KvtideSpec, KvtideWorker
from kvtide.plugin.vllm.stack import TierStack
from kvtide.plugin.vllm.timely import TimelyThreads
from kvtide.tier import MooncakeTier, Namespace
from kvtide.tier.names import name_of

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""How long a step that computes nothing waits for fetches. A new request waits as long at most."""

LOOKUP_S = 5.0
"""How long a store may take to say what it has."""

READS: Table = {
    "OffloadingConnector": (
        *("connector_scheduler", "connector_worker", "register_kv_caches", "handle_preemptions"),
        *("start_load_kv", "build_connector_meta", "build_connector_worker_meta"),
        *("on_new_request", "update_state_after_alloc"),
        *("update_connector_output", "get_kv_connector_stats", "get_num_new_matched_tokens"),
    ),
    "KVConnectorBase_V1": (
        *("get_transfer_results", "get_handshake_metadata"),
        *("set_xfer_handshake_metadata_pp_aware", "bind_connector_metadata"),
    ),
    "OffloadingConnectorScheduler": ("manager", "_req_status"),
    "RequestOffloadState": ("group_states",),
    "RequestGroupState": ("next_stored_chunk_idx",),
    "OffloadingConnectorWorker": ("spec", "worker"),
    "OffloadingConnectorMetadata": ("load_jobs", "store_jobs", "jobs_to_flush"),
    "OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats", "aggregate"),
    "TransferJob": ("req_id",),
    "KVConnectorTransferResults": ("finished_recving", "failed_recving"),
    "SchedulerOutput": ("total_num_scheduled_tokens",),
    "ParallelConfig": ("data_parallel_size",),
    "KVConnectorOutput": ("kv_connector_worker_meta", "failed_recving"),
    "VllmConfig": (
        *("kv_transfer_config", "lora_config", "speculative_config", "parallel_config"),
        *("cache_config", "model_config"),
    ),
    "CacheConfig": ("enable_prefix_caching",),
    "ModelConfig": ("is_hybrid", "is_attention_free"),
    "KVTransferConfig": ("kv_connector_extra_config", "kv_role"),
}
"""What is read and called of vLLM's connector."""


@dataclass
class KvtideMetadata(OffloadingConnectorMetadata):
    """What the scheduler sends to the workers in each step."""

    orders: Orders = field(default_factory=Orders)
    is_empty: bool = False
    """Whether the step computes nothing, so that whoever waits for a fetch holds up nobody."""


@dataclass
class KvtideWorkerMetadata(OffloadingWorkerMetadata):
    """What a worker sends back in each step."""

    report: BlockReport = field(default_factory=BlockReport)

    def aggregate(self, other: Any) -> KvtideWorkerMetadata:
        """Adds what another rank sends."""
        both = super().aggregate(other)
        report = BlockReport()
        for sent in (self, other):
            report.add(sent.report)
        return KvtideWorkerMetadata(both.completed_jobs, both.transfer_stats, report)


@final
@dataclass
class KvtideStart(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler before the first request."""

    start: Start
    namespace: Namespace


class KvtideConnector(OffloadingConnector):
    """vLLM makes one in the scheduler and one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises UsageError for wrong settings, Refused for what can't be moved exactly."""
        VLLM_READS.refuse_if_moved()
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config.setdefault("spec_name", SPEC)
        self._settings = read_settings(transfer.kv_connector_extra_config)
        refuse_what_is_inexact(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: dict[int, str] = {}
        """The requests of loads under way, by job."""
        self._open: OpenStore | None = None
        # The step of one engine holds up the others where several go in step.
        is_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._idle_wait_s = IDLE_WAIT_S if is_alone else 0.0
        if role == KVConnectorRole.WORKER:
            spec = cast(KvtideSpec, self.connector_worker.spec)
            spec.open_worker = partial(self._open_worker, vllm_config, spec)
        else:
            end_with_parent()
            self._adapters = Adapters()
            self._resumes = ResumeCounts()

    # ---- worker --------------------------------------------------------------------------

    def _open_worker(self, vllm_config: Any, spec: KvtideSpec, kv_caches: Any) -> KvtideWorker:
        self._open = open_store(
            vllm_config, spec.config, self._settings, kv_caches, current_platform
        )
        return KvtideWorker(self._open.blocks, self._open.close)

    @property
    def _worker(self) -> KvtideWorker:
        return cast(KvtideWorker, self.connector_worker.worker)

    def get_handshake_metadata(self) -> KvtideStart | None:
        """What the scheduler must know before the first request."""
        return None if self._open is None else KvtideStart(self._open.start, self._open.namespace)

    def handle_preemptions(self, kv_connector_metadata: KvtideMetadata) -> None:
        """Follows the scheduler's orders; then does what vLLM does before a step."""
        self._worker.store.follow(kv_connector_metadata.orders)
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **rest: Any) -> None:
        """Begins the loads of a step."""
        jobs = self._connector_metadata.load_jobs
        self._loads.update({job_id: job.req_id for job_id, job in jobs.items()})
        super().start_load_kv(forward_context, **rest)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose loads have ended, and those among them whose KV isn't there."""
        results = super().get_transfer_results(finished_req_ids)
        failed, self._worker.failed_loads = self._worker.failed_loads, set()
        results.failed_recving = {self._loads[job_id] for job_id in failed & self._loads.keys()}
        ended = results.finished_recving
        self._loads = {job: name for job, name in self._loads.items() if name not in ended}
        if self._connector_metadata.is_empty and not ended:
            self._worker.store.wait_for_fetches(self._idle_wait_s)
        return results

    def build_connector_worker_meta(self) -> KvtideWorkerMetadata | None:
        """What this worker sends to the scheduler after a step."""
        if self.connector_worker is None:
            return None
        sent = super().build_connector_worker_meta()
        report = self._worker.store.take_report()
        if sent is None and not report:
            return None
        sent = sent or OffloadingWorkerMetadata()
        return KvtideWorkerMetadata(sent.completed_jobs, sent.transfer_stats, report)

    # ---- scheduler -----------------------------------------------------------------------

    @property
    def _manager(self) -> KvtideManager:
        return cast(KvtideManager, self.connector_scheduler.manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Opens the books with the least that a rank holds, and with what the first rank found.

        Whether the others have the same a fetch tells.
        """
        first, *others = (metadata[rank] for rank in sorted(metadata))
        starts = [told.start for told in (first, *others)]
        start = Start(
            min(start.block_count for start in starts),
            first.start.names,
            min(start.tier_blocks for start in starts),
        )
        namespace = first.namespace
        self._manager.books.open(start, lambda key: name_of(namespace.key_of(key.hex())))
        if self._settings.mooncake is not None:
            far = MooncakeTier(self._settings.mooncake)
            lookups = Lookups(TierStack([far]), TimelyThreads(1, LOOKUP_S))
            self._manager.ask_far(lookups, lambda key: namespace.key_of(key.hex()), far.close)

    def on_new_request(self, request: Any) -> None:
        """Notes with which adapter a request is computed."""
        if request.lora_request is not None:
            adapter = self._adapters.of_request(request.lora_request)
            self._manager.expect(request.request_id, adapter)
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes how many tokens of a request are about to be loaded."""
        self._resumes.note_load(request.request_id, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens a request can load; None while it waits for a block."""
        if request.lora_request is not None:
            self._adapters.look_again(request.lora_request)
        if self._manager.must_wait(request.request_id):
            return None, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def build_connector_meta(self, scheduler_output: Any) -> KvtideMetadata:
        """What the scheduler sends to the workers for a step."""
        self._manager.counts += self._resumes.note_step(scheduler_output)
        sent = super().build_connector_meta(scheduler_output)
        fixed = {part.name: getattr(sent, part.name) for part in fields(sent)}
        is_empty = not scheduler_output.total_num_scheduled_tokens
        if is_empty:
            self._manager.wait_for_answers(self._idle_wait_s)
        return KvtideMetadata(**fixed, orders=self._manager.books.take_orders(), is_empty=is_empty)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in what workers report; then notes the ends of their moves."""
        sent = connector_output.kv_connector_worker_meta
        if isinstance(sent, KvtideWorkerMetadata):
            self._manager.take_in(sent.report)
        for name in connector_output.failed_recving or ():
            self._resumes.note_failure(name)
            self._save_again(name)
        super().update_connector_output(connector_output)

    def _save_again(self, name: str) -> None:
        """Has a request whose load failed save all its blocks: it computes the damaged one again.

        vLLM takes what it was to load for saved.
        """
        status = self.connector_scheduler._req_status.get(name)
        for group in () if status is None else status.group_states:
            group.next_stored_chunk_idx = 0


def refuse_what_is_inexact(vllm_config: Any) -> None:
    """Raises Refused for a server whose KV kvtide couldn't tell from other KV, or has no blocks."""
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise Refused('kvtide saves and loads; set "kv_role" to "kv_both"')
    if vllm_config.lora_config is not None and changes_are_allowed():
        raise Refused(
            f"{CHANGES_ALLOWED} lets an adapter's weights change under its requests, and kvtide "
            "isn't told; unset it, or serve without --enable-lora or without kvtide"
        )
    draft = vllm_config.speculative_config
    if draft is not None:
        named = " ".join(str(part) for part in (draft.method, draft.model) if part)
        raise Refused(
            f"kvtide doesn't know how a draft ({named}) changes the KV that it would save; serve "
            "without --speculative-config, or without kvtide"
        )
    cache, model = vllm_config.cache_config, vllm_config.model_config
    has_state = model.is_hybrid or model.is_attention_free
    if has_state and not cache.enable_prefix_caching:
        raise Refused(
            "vLLM keeps recurrent state in blocks that kvtide can save only with prefix caching; "
            "serve with --enable-prefix-caching, or without kvtide"
        )
