"""Results that SGLang hasn't looked at yet: with overlapped scheduling, the last step's.

SGLang retracts requests while their last step's token is still on its way, throws that token away,
and computes it again later. The KV of a token may be computed twice. A recurrent state may not: it
has taken that step already, and would take it again:

    answer so far   a b c              saved: KV of a b (c's is computed again) and a state
    step under way        c -> d       after a b c, which c is added to once more

So where there is such a state, the results are looked at before anybody is retracted, and a request
whose result is still on its way isn't saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakSet

from kvtide.plugin.reader import Table

READS: Table = {
    "Scheduler": ("result_queue?", "process_batch_result", "spec_algorithm"),
    "ScheduleBatch": (
        *("check_decode_mem", "reqs", "mamba_track_mask_cpu", "mamba_track_mask_next_cpu"),
        *("mamba_track_buffer_indices", "mamba_decode_batch_idx_cpu", "req_to_token_pool"),
    ),
    "Req": ("decode_batch_idx",),
    "ReqKvInfo": ("mamba_next_track_idx",),
    "HybridReqToTokenPool": ("get_mamba_ping_pong_other_idx",),
}


@contextmanager
def without_last_tokens(reqs: Iterable[Any]) -> Iterator[None]:
    """Hides the last token of these requests' answers for a while."""
    whole = {req: req.output_ids for req in reqs}
    for req, output_ids in whole.items():
        req.output_ids = output_ids[:-1]
    try:
        yield
    finally:
        for req, output_ids in whole.items():
            req.output_ids = output_ids


@final
class UnseenResults:
    """Results of a scheduler's steps that are on their way, oldest first: each with its batch."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._seen: list[Any] = []
        """Results in the queue that have been looked at: SGLang will come to them once more."""
        self._uncounted: WeakSet[Any] = WeakSet()
        """Requests, of the results looked at now, whose last token SGLang doesn't count on yet."""

    def concern(self, req: Any) -> bool:
        """Whether the request is part of a step whose result is on its way."""
        return any(req is other for batch, _ in self._unseen() for other in batch.reqs)

    def is_due(self, batch: Any) -> bool:
        """Whether results have to be looked at now, since some of the batch may be retracted."""
        from sglang.srt.managers import scheduler as sglang_scheduler

        if not self._unseen() or not self._scheduler.spec_algorithm.is_none():
            return False
        return bool(sglang_scheduler.TEST_RETRACT) or not batch.check_decode_mem()

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Lets SGLang process all results at once, and meanwhile see an empty queue."""
        queue = self._scheduler.result_queue
        entries, unseen = list(queue), self._unseen()
        queue.clear()
        for batch, result in unseen:
            self._scheduler.process_batch_result(batch, result)
            self._seen.append(result)
            self._uncounted.update(batch.reqs)
            _turn_after_a_checkpoint(batch)
        try:
            yield
        finally:
            queue.extend(entries)
            self._uncounted.clear()
            for batch, _ in unseen:
                _turn_before_a_checkpoint(batch)

    def is_repeated(self, result: Any) -> bool:
        """Whether the result has been looked at already; asked once, when SGLang comes to it."""
        before = len(self._seen)
        self._seen = [seen for seen in self._seen if seen is not result]
        return len(self._seen) < before

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Around SGLang's counting of a batch's last tokens for penalties.

        While steps overlap it counts the token before the last one, since the last is on its way.
        Of a result that was looked at early the last is there, so it is hidden from it.
        """
        with without_last_tokens(req for req in batch.reqs if req in self._uncounted):
            yield

    def _unseen(self) -> list[tuple[Any, Any]]:
        queue = getattr(self._scheduler, "result_queue", None) or ()
        seen = {id(result) for result in self._seen}
        return [(batch, result) for batch, result in queue if id(result) not in seen]


# A recurrent state's checkpoints, for the prefix cache, are written to two slots in turn, and a
# request says which one is next. While steps overlap SGLang turns when it looks at the result
# before a checkpoint's, since that step has its slot by then; when nothing overlaps, after the
# checkpoint's own. A result that is looked at early looks like the latter; its neighbours don't.


def _turn_after_a_checkpoint(batch: Any) -> None:
    """Back to how it was: SGLang has turned twice for this step."""
    if not _has_two_slots(batch):
        return
    for req, is_checkpoint, slot in zip(
        batch.reqs, batch.mamba_track_mask_cpu, batch.mamba_track_buffer_indices, strict=True
    ):
        if is_checkpoint and req.kv.mamba_next_track_idx is not None:
            req.kv.mamba_next_track_idx = _other(batch, slot)


def _turn_before_a_checkpoint(batch: Any) -> None:
    """The step after this one has its slot now, if its request is still there."""
    if not _has_two_slots(batch):
        return
    for req, is_next, count in zip(
        batch.reqs, batch.mamba_track_mask_next_cpu, batch.mamba_decode_batch_idx_cpu, strict=True
    ):
        is_prepared = req.decode_batch_idx == count + 1
        if is_next and is_prepared and req.kv.mamba_next_track_idx is not None:
            req.kv.mamba_next_track_idx = _other(batch, req.kv.mamba_next_track_idx)


def _has_two_slots(batch: Any) -> bool:
    from sglang.srt.runtime_context import get_exec

    if batch.mamba_track_mask_cpu is None or batch.mamba_track_mask_next_cpu is None:
        return False
    return not get_exec().mamba.enable_mamba_extra_buffer_lazy


def _other(batch: Any, slot: int) -> int:
    other: int = batch.req_to_token_pool.get_mamba_ping_pong_other_idx(slot)
    return other
