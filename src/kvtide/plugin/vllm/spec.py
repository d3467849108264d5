"""KvtideSpec: vLLM's offloading with kvtide's books in the scheduler and its store in each worker.

A rank's blocks are in its worker's process; the scheduler has only their keys. They talk by what
vLLM sends anyway: see connector.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.adapters import AdapterFiles, AdapterOf
from kvtide.plugin.vllm.block_store import BlockStore, Pairs
from kvtide.plugin.vllm.books import Asker, BlockBooks, BlockPlace
from kvtide.plugin.vllm.lookups import Lookups
from kvtide.plugin.vllm.messages import COUNTS, BlockReport, names_of

READS: Table = {
    "OffloadingSpec": ("config", "extra_config", "offload_prompt_only", "tokens_per_block"),
    "OffloadingConfig": ("groups", "parallel", "cache", "extra_config"),
    "OffloadingGroupConfig": ("group_id", "layer_names"),
    "OffloadingParallelConfig": ("world_size", "rank"),
    "OffloadingCacheConfig": ("blocks_per_chunk",),
    "OffloadingManager": (
        *("lookup", "get_load_source", "prepare_load", "complete_load", "prepare_store"),
        *("complete_store", "on_new_request", "on_request_finished", "on_schedule_end"),
        *("has_pending_work", "reset_cache", "get_stats", "shutdown"),
    ),
    "ReqContext": ("req_id", "set_state", "get_state"),
    "OffloadingWorker": ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
    "OffloadingConnectorStats": ("increase_counter",),
    "GPULoadStoreSpec": ("block_ids", "group_sizes"),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
    "CanonicalKVCacheTensor": ("tensor",),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    "LookupResult": ("MISS", "HIT", "HIT_PENDING", "RETRY"),
    "CacheHitSource": ("HOST", "DISK"),
}
"""What is read and called of vLLM's offloading."""

_RESULTS = {
    BlockPlace.NOWHERE: LookupResult.MISS,
    BlockPlace.SAVING: LookupResult.HIT_PENDING,
    BlockPlace.COMING: LookupResult.HIT_PENDING,
    BlockPlace.HERE: LookupResult.HIT,
}


@final
class KeySpec(LoadStoreSpec):
    """Blocks outside the device, by their keys, in the order of the blocks on the device.

    `reset_number` is the last reset before the move was ordered, and `files` those of the adapter
    with which the blocks are computed.
    """

    def __init__(
        self, keys: Sequence[bytes], reset_number: int = 0, files: AdapterFiles | None = None
    ) -> None:
        self.keys = tuple(keys)
        self.reset_number = reset_number
        self.files = files

    def is_valid(self) -> bool:
        """Whether the blocks that were saved are those of their keys."""
        return self.files is None or self.files.are_unchanged()


@final
class KvtideManager(OffloadingManager):
    """The scheduler's side: vLLM's questions, answered from the books."""

    def __init__(self, books: BlockBooks) -> None:
        self.books = books
        self._adapters: dict[str, AdapterOf] = {}
        """By the names of requests that vLLM is about to announce."""
        self._askers: dict[str, Asker] = {}
        """By the names of requests that haven't finished."""
        self._far: Lookups | None = None
        self._close_far: Callable[[], None] = lambda: None
        self._far_name_of: Callable[[bytes], str] = bytes.hex
        self.counts: Counter[str] = Counter()
        """What was counted here and in workers since the last `get_stats`."""

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a block can be loaded, or may be in a later step."""
        adapter = req_context.get_state(AdapterOf)
        if adapter is not None and not adapter.is_known:
            return LookupResult.MISS
        (own_key,) = _keys_of([key], req_context)
        if self._far is not None and not self.books.knows(own_key):
            is_far = self._far.ask(req_context.req_id, own_key, self._far_name_of(own_key))
            if is_far is None:
                return LookupResult.RETRY
            if is_far:
                self.books.note_below(own_key)
        return _RESULTS[self.books.look_up(own_key, self._asker(req_context.req_id))]

    def ask_far(
        self, lookups: Lookups, name_of: Callable[[bytes], str], close: Callable[[], None]
    ) -> None:
        """From now on asks a store that other machines share for blocks that the books don't know.

        `name_of` gives a block's name there; `close` leaves the store.
        """
        self._far, self._far_name_of, self._close_far = lookups, name_of, close

    def take_in(self, report: BlockReport) -> None:
        """Takes in what workers report."""
        self.books.note(report)
        self.counts += report.counts
        if self._far is not None:
            self._far.mark_missing(report.missing)

    def wait_for_answers(self, at_most_s: float) -> None:
        """Blocks until the store has answered all that it was asked, or for so long."""
        if self._far is not None:
            self._far.wait(at_most_s)

    def expect(self, req_id: str, adapter: AdapterOf) -> None:
        """Says with which adapter the next new request is computed."""
        self._adapters[req_id] = adapter

    def must_wait(self, req_id: str) -> bool:
        """Whether a request needn't look its blocks up, since one of them is still on its way."""
        return self.books.must_wait(self._asker(req_id))

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """The tier that a block came from."""
        (own_key,) = _keys_of([key], req_context)
        is_from_tier = self.books.came_from_tier(own_key)
        return CacheHitSource.DISK if is_from_tier else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> KeySpec:
        """The blocks stay until `complete_load`."""
        own_keys = _keys_of(keys, req_context)
        self.books.begin_load(own_keys)
        return KeySpec(own_keys, self.books.reset_number)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """A load has ended."""
        self.books.end_load(_keys_of(keys, req_context))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Makes room for as many blocks as there is room for, the first ones first."""
        adapter = req_context.get_state(AdapterOf)
        if adapter is not None and not adapter.is_known:
            self.counts["unsaved_blocks"] += len(keys)
            return PrepareStoreOutput([], KeySpec([]), [])
        by_own = dict(zip(_keys_of(keys, req_context), keys, strict=True))
        saved = self.books.begin_save(list(by_own))
        without_room = sum(key not in self.books for key in by_own)
        if without_room:
            self.counts["unsaved_blocks"] += without_room
        files = None if adapter is None else adapter.files
        target = KeySpec(saved, self.books.reset_number, files)
        return PrepareStoreOutput([by_own[key] for key in saved], target, [])

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """A save has ended."""
        self.books.end_save(_keys_of(keys, req_context))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """New blocks are saved as they come; those that were found are saved already."""
        adapter = self._adapters.pop(req_context.req_id, None)
        if adapter is not None:
            req_context.set_state(adapter)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """The request looks nothing up any more."""
        self._askers.pop(req_context.req_id, None)
        if self._far is not None:
            self._far.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """A step of the scheduler has ended."""
        self.books.end_step()
        if self._far is not None:
            self._far.flush()

    def has_pending_work(self) -> bool:
        """Whether the scheduler must go on although no request runs."""
        return self.books.is_waiting

    def reset_cache(self) -> None:
        """Nothing that was saved before is used any more, from tiers neither."""
        self.books.clear()
        self.shutdown()  # no other machine has KV of weights that only this engine has

    def shutdown(self) -> None:
        """Leaves the store that other machines share. Repeatable."""
        far, self._far = self._far, None
        if far is not None:
            far.close()
            self._close_far()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts of the workers, for vLLM's metrics."""
        if not self.counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in self.counts.items():
            stats.increase_counter(*names_of([name]), count)
        self.counts = Counter()
        return stats

    def _asker(self, req_id: str) -> Asker:
        return self._askers.setdefault(req_id, Asker())


@final
class KvtideWorker(OffloadingWorker):
    """A worker's side: vLLM's moves, done by the store.

    A move that failed is reported to vLLM as ended: `failed_loads` tells, and the report to the
    scheduler, that its blocks aren't there.
    """

    def __init__(self, store: BlockStore, close: Any) -> None:
        self.store = store
        self.failed_loads: set[int] = set()
        """Loads that ended badly since the connector last looked."""
        self._close = close

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KeySpec) -> bool:
        """Begins to copy blocks off the device."""
        pairs = _pairs(dst_spec, src_spec)
        self.store.save(job_id, pairs, dst_spec.reset_number, dst_spec.is_valid)
        return True

    def submit_load(self, job_id: int, src_spec: KeySpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begins to copy blocks to the device."""
        self.store.load(job_id, _pairs(src_spec, dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The moves that have ended."""
        ended = self.store.take_ended()
        self.failed_loads.update(move.job_id for move in ended if not move.went_well)
        return [TransferResult(move.job_id, True, move.size_bytes, move.seconds) for move in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until these moves have ended."""
        self.store.wait(job_ids)

    def shutdown(self) -> None:
        """Waits for moves, and a while for the tier. Repeatable."""
        self._close()


class KvtideSpec(OffloadingSpec):
    """What vLLM makes of the settings: a manager in the scheduler, a worker on each rank.

    `open_worker` is set by the connector, which knows the model.
    """

    def __init__(self, config: Any) -> None:
        """Raises Refused for what can't be moved exactly, or as the settings want it."""
        super().__init__(config)
        # vLLM's default leaves answers out, and a preempted request's KV is half answer.
        self.offload_prompt_only = bool(config.extra_config.get("offload_prompt_only", False))
        if config.cache.blocks_per_chunk != 1:
            raise Refused("kvtide moves single blocks; leave out block_size and blocks_per_chunk")
        self.open_worker: Any = None

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """The metrics that `get_stats` gives values for."""
        return {
            name: OffloadingCounterMetadata(documentation=text)
            for name, text in zip(names_of(COUNTS), COUNTS.values(), strict=True)
        }

    def get_manager(self) -> KvtideManager:
        """The scheduler's side."""
        return KvtideManager(BlockBooks(self.config.parallel.world_size))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KvtideWorker:
        """A worker's side, over the caches. Raises Refused under a connector of vLLM's own."""
        if self.open_worker is None:
            raise Refused(
                'KvtideSpec needs "kv_connector": "KvtideConnector", since vLLM\'s own connector '
                "ends the engine when a load fails; `kvtide vllm` prints the settings"
            )
        worker: KvtideWorker = self.open_worker(kv_caches)
        return worker


def _keys_of(keys: Collection[bytes], req_context: Any) -> list[bytes]:
    """The keys of a request's blocks, in which its adapter's weights count."""
    adapter = req_context.get_state(AdapterOf)
    return list(keys) if adapter is None else [adapter.key_of(key) for key in keys]


def _pairs(outside: KeySpec, inside: GPULoadStoreSpec) -> list[Pairs]:
    """For each group the keys and ids of blocks; id 0 is no block."""
    pairs: list[Pairs] = []
    first = 0
    for size in inside.group_sizes:
        both: Iterable[tuple[bytes, int]] = zip(
            outside.keys[first : first + size],
            inside.block_ids[first : first + size].tolist(),
            strict=True,
        )
        pairs.append([(key, block) for key, block in both if block])
        first += size
    assert first == len(outside.keys), f"{len(outside.keys)} keys for {first} blocks"
    return pairs
