"""Attachment: connects kvtide to this process's scheduler, once the scheduler has its pools.

The hooks call an attachment. It has a keeper, which moves requests, or the reason why there is
none. Backups have two owners, because SGLang has a place for them in only one kind of server:

    a decode server     SGLang keeps a backup in `req.kv.retraction_backup`, passes it to the
                        restore, and says when to forget it. kvtide keeps its backup there, too.
    an ordinary server  SGLang saves nothing, and doesn't tell when a waiting request is gone. So a
                        shelf (`ordinary.shelf`) has the backups, and looks at the waiting queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

from kvtide.errors import ArenaFull, KvtideError
from kvtide.plugin.keeper import Backup, Keeper
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.open_keeper import open_keeper
from kvtide.plugin.sglang.ordinary.allocation import window_tokens
from kvtide.plugin.sglang.ordinary.shelf import open_shelf
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.reads import SGLANG_READS
from kvtide.plugin.sglang.requests import STATE
from kvtide.plugin.sglang.scheduler_metrics import metrics_of
from kvtide.plugin.sglang.settings import Settings
from kvtide.plugin.sglang.unseen_results import UnseenResults

logger = logging.getLogger(__name__)

READS: Table = {
    "Scheduler": (
        "token_to_kv_pool_allocator",
        "req_to_token_pool",
        "tree_cache",
        "draft_worker?",
        "sliding_window_size?",
        "attn_tp_cpu_group",
        "attn_cp_cpu_group",
        "tp_cpu_group",
        "metrics_collector_context",
        "output_streamer",
    ),
    "DecodePreallocQueue": ("retracted_queue",),
    "BaseSpecWorker": ("_draft_model_runners",),
    "ModelRunner": ("token_to_kv_pool", "req_to_token_pool"),
    "HybridReqToTokenPool": ("mamba_pool",),
}


@final
@dataclass
class Attachment:
    """Saves and restores a scheduler's requests, or says why it doesn't."""

    scheduler: Any
    settings: Settings
    keeper: Keeper | None = None
    refusal: str = ""
    """Why there is no keeper."""
    lost: dict[str, str] = field(default_factory=dict)
    """Why requests couldn't be restored, by id. The hook that resumes requests empties it."""
    is_yielding: bool = False
    """Whether SGLang now handles a request that isn't saved: see `yielding`."""
    allocator: Any = None
    """SGLang's allocator of the pool that the keeper has adopted."""
    results: UnseenResults = field(init=False)

    def __post_init__(self) -> None:
        self.results = UnseenResults(self.scheduler)

    def covers(self, allocator: Any) -> bool:
        """Whether kvtide saves requests with slots of this allocator."""
        return self.keeper is not None and allocator is self.allocator

    def save(self, req: Any) -> bool:
        """Saves the request. Returns False, and logs the reason, if that fails."""
        assert self.keeper is not None, "asked only where there is a keeper"
        try:
            req.kv.retraction_backup = self.keeper.save(req)
        except KvtideError as error:
            level = logging.DEBUG if isinstance(error, ArenaFull) else logging.WARNING
            logger.log(level, "kvtide couldn't save request %r: %s", req.rid, error)
            return False
        return True

    def must_look(self, batch: Any) -> bool:
        """Whether unseen results must be processed before requests of this batch are saved."""
        has_state = self.keeper is not None and STATE in self.keeper.request_kinds
        return has_state and self.results.is_due(batch)

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """Inside this context the hooks answer as SGLang would without kvtide."""
        before, self.is_yielding = self.is_yielding, True
        try:
            yield
        finally:
            self.is_yielding = before

    def prefill_computes_again(self) -> bool:
        """Whether the prefill server computes the KV of unsaved requests again."""
        from sglang.srt.mem_cache.common import dsv4_needs_rebootstrap

        with self.yielding():
            return bool(dsv4_needs_rebootstrap(self.allocator))

    def restore(self, req: Any) -> bool:
        """Restores the request. Returns False if that fails; then the request must not go on.

        The backup is discarded in both cases.
        """
        assert self.keeper is not None, "asked only where there is a keeper"
        backup, req.kv.retraction_backup = req.kv.retraction_backup, None
        try:
            self.keeper.restore(req, backup)
        except KvtideError as error:
            logger.error("kvtide couldn't restore request %r: %s", req.rid, error)
            self.lost[req.rid] = str(error)
            return False
        return True

    def read_ahead(self, waiting: Iterable[Any]) -> None:
        """Begins to bring back from a tier those of the waiting requests that come back next."""
        if self.keeper is not None:
            self.keeper.read_ahead(req.kv.retraction_backup for req in waiting if is_saved(req))

    def discard(self, req: Any) -> None:
        """Discards the request's backup."""
        assert self.keeper is not None, "asked only where there is a keeper"
        self.keeper.discard(req.kv.retraction_backup)
        req.kv.retraction_backup = None

    def close(self) -> None:
        """Closes the keeper when the scheduler ends."""
        if self.keeper is not None:
            self.keeper.close()


def is_saved(req: Any) -> bool:
    """Whether the request's backup is kvtide's, not SGLang's."""
    return isinstance(req.kv.retraction_backup, Backup)


_attachments: list[Attachment] = []


def attached() -> Attachment | None:
    """This process's attachment; None before the scheduler has its pools."""
    return _attachments[-1] if _attachments else None


def saves_requests(settings: Settings) -> bool:
    """Whether this server, with its settings, retracts requests that kvtide saves."""
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    mode, may_switch = disagg.disaggregation_mode, bool(disagg.enable_pd_role_switch)
    return mode == "decode" or may_switch or (mode == "null" and settings.is_colocated)


def attach(scheduler: Any, settings: Settings) -> Attachment:
    """Makes the process's attachment. Raises nothing; `refusal` has the reason of a failure."""
    attachment = Attachment(scheduler, settings)
    _attachments[:] = [attachment]
    try:
        keeper = _keeper_of(scheduler, settings, attachment.results)
        try:
            _serve(scheduler, keeper)
        except BaseException:
            keeper.close()
            raise
        attachment.keeper = keeper
        attachment.allocator = Reader(scheduler, READS)["token_to_kv_pool_allocator"]
    except KvtideError as error:
        attachment.refusal = str(error)
    except Exception as error:
        logger.exception("kvtide can't read this SGLang")
        attachment.refusal = f"{type(error).__name__}: {error}"
    return attachment


def _serve(scheduler: Any, keeper: Keeper) -> None:
    """Connects the metrics to the keeper, and in an ordinary server a shelf."""
    from sglang.srt.runtime_context import get_disagg

    try:
        metrics = metrics_of(Reader(scheduler, READS)["metrics_collector_context"])
        if metrics is not None:
            keeper.follow(metrics.update)
    except Exception:
        logger.exception("kvtide goes without metrics")
    if get_disagg().disaggregation_mode == "null":
        open_shelf(scheduler, keeper)


def would_cover(request_pool: Any, allocator: Any) -> bool:
    """Whether a keeper can be made for a pool; asked before there is a scheduler."""
    try:
        _refuse_pipelines()
        SGLANG_READS.refuse_if_moved()
        subject = Subject.in_scheduler(allocator, request_pool)
        open_keeper(subject, [], Settings(host_memory_bytes=0)).close()
    except KvtideError:
        return False
    except Exception:
        logger.exception("kvtide can't read this SGLang")
        return False
    return True


def _refuse_pipelines() -> None:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().pp_size > 1:
        raise Refused(
            "pipeline parallelism: stages that schedule apart can't agree on which requests the "
            "arena has no room for"
        )


def _keeper_of(scheduler: Any, settings: Settings, results: UnseenResults) -> Keeper:
    from sglang.srt.runtime_context import get_parallel

    _refuse_pipelines()
    SGLANG_READS.refuse_if_moved()
    reads = Reader(scheduler, READS)
    ranks = Ranks([reads["attn_tp_cpu_group"], reads["attn_cp_cpu_group"]], reads["tp_cpu_group"])
    subject = Subject.in_scheduler(
        reads["token_to_kv_pool_allocator"], reads["req_to_token_pool"], _window_tokens(reads)
    )
    settings = replace(settings, rank_count=rank_count(get_parallel()))
    return open_keeper(subject, draft_pools(scheduler), settings, ranks, results.concern)


def rank_count(parallel: Any) -> int:
    """The number of a server's ranks on this host (tensor, pipeline and data parallel)."""
    replicas = 1 if parallel.attn_dp_enabled else parallel.dp_size
    total = parallel.tp_size * parallel.pp_size * replicas
    return int(max(1, -(-total // parallel.nnodes)))


def _window_tokens(reads: Reader) -> int | None:
    """How many of a request's last tokens have rows in a window when it comes back.

    In a decode server with a prefix cache, a resumed request gets slots for a whole window as the
    cache counts it, from the boundary of the last page. In an ordinary server kvtide acquires the
    slots itself.
    """
    from sglang.srt.runtime_context import get_disagg

    size: int | None = reads["sliding_window_size"]
    if size is None:
        return None
    disagg, page_size = get_disagg(), int(reads["token_to_kv_pool_allocator"].page_size)
    if disagg.disaggregation_mode == "null":
        is_shared = reads["tree_cache"].supports_prefix_sharing()
        return window_tokens(size, page_size, is_shared=is_shared)
    is_cached = disagg.disaggregation_mode == "decode" and (
        disagg.disaggregation_decode_enable_radix_cache
    )
    return 1 + max(size, page_size) if is_cached else size


def draft_pools(scheduler: Any) -> list[Any]:
    """The pools of the draft model, which uses the target's slots and rows; maybe none.

    A draft model that reads the target's KV or recurrent state has no pool for it.
    """
    reads = Reader(scheduler, READS)
    worker, target = reads["draft_worker"], reads["token_to_kv_pool_allocator"].get_kvcache()
    if worker is None:
        return []
    runners = Reader(worker, READS)["_draft_model_runners"]()
    readers = [Reader(runner, READS) for runner in runners]
    pools = [reader["token_to_kv_pool"] for reader in readers]
    pools += [_state_pool(reader["req_to_token_pool"]) for reader in readers]
    shared = {id(None), id(target), id(_state_pool(reads["req_to_token_pool"]))}
    distinct = {id(pool): pool for pool in pools if id(pool) not in shared}
    return list(distinct.values())


def _state_pool(request_pool: Any) -> Any:
    """The pool of recurrent state in a request pool, or None."""
    kinds = {kind.__name__ for kind in type(request_pool).__mro__}
    return Reader(request_pool, READS)["mamba_pool"] if "HybridReqToTokenPool" in kinds else None
