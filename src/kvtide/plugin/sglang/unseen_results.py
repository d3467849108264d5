"""Results that SGLang hasn't processed yet: with overlapped scheduling, those of the last step.

SGLang retracts requests before it has seen the tokens of their last step. It drops these tokens and
computes them again later. The KV of a token may be computed twice, but a recurrent state may not:
it has taken that step already, and would take it again:

    answer so far    a b c             saved: the KV of a b, and a state after a b c
    unseen step            c -> d      later c is computed again, and added to the state again

So if requests have such a state, the unseen results are processed before a retraction, and a
request with an unseen result isn't saved.
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
    """The results that a scheduler hasn't seen, oldest first, each with its batch."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._seen: list[Any] = []
        """Results in the queue that were processed early. SGLang will come to them again."""
        self._uncounted: WeakSet[Any] = WeakSet()
        """Requests of early results, whose last token SGLang doesn't expect yet."""

    def concern(self, req: Any) -> bool:
        """Whether the request has an unseen result."""
        return any(req is other for batch, _ in self._unseen() for other in batch.reqs)

    def is_due(self, batch: Any) -> bool:
        """Whether results must be processed now, because requests of the batch may be retracted."""
        from sglang.srt.managers import scheduler as sglang_scheduler

        if not self._unseen() or not self._scheduler.spec_algorithm.is_none():
            return False
        return bool(sglang_scheduler.TEST_RETRACT) or not batch.check_decode_mem()

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Lets SGLang process all results now; inside this context it sees an empty queue."""
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
        """Whether the result was processed early. Call this once, when SGLang comes to it."""
        before = len(self._seen)
        self._seen = [seen for seen in self._seen if seen is not result]
        return len(self._seen) < before

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """SGLang counts a batch's last tokens for penalties inside this context.

        While steps overlap SGLang takes the last known token for the last but one. After an early
        result the last token is known, so it is hidden here.
        """
        with without_last_tokens(req for req in batch.reqs if req in self._uncounted):
            yield

    def _unseen(self) -> list[tuple[Any, Any]]:
        queue = getattr(self._scheduler, "result_queue", None) or ()
        seen = {id(result) for result in self._seen}
        return [(batch, result) for batch, result in queue if id(result) not in seen]


# Checkpoints of a recurrent state, for the prefix cache, are written to two slots in turn, and a
# request says which slot is next. If steps overlap, SGLang switches the slot when it processes the
# result before a checkpoint's, because the checkpoint's step already has its slot then. If steps
# don't overlap, it switches after the checkpoint's result. For an early result SGLang assumes that
# steps don't overlap, but for the results before and after it assumes that they do.


def _turn_after_a_checkpoint(batch: Any) -> None:
    """Undoes a switch: SGLang has switched the slot twice for this step."""
    if not _has_two_slots(batch):
        return
    for req, is_checkpoint, slot in zip(
        batch.reqs, batch.mamba_track_mask_cpu, batch.mamba_track_buffer_indices, strict=True
    ):
        if is_checkpoint and req.kv.mamba_next_track_idx is not None:
            req.kv.mamba_next_track_idx = _other(batch, slot)


def _turn_before_a_checkpoint(batch: Any) -> None:
    """Switches for the step after this one, which has its slot now, if its request still runs."""
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
