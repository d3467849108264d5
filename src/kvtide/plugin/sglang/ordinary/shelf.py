"""Shelf: the backups of requests that an ordinary server, without disaggregation, has retracted.

An ordinary server drops the KV of a retracted request and computes it again. With kvtide a shelf
has the request's backup. The request stays in SGLang's waiting queue, where aborts, timeouts,
priorities and metrics find it:

    retract_decode                     get_new_batch_prefill
      release_req                        Shelf.resume
        Shelf.keep                         is there room, by SGLang's rule?   (resume)
          Keeper.save                      slots, Keeper.restore              (allocation)
      the waiting queue                    a batch of it joins the running batch

Its next step is an ordinary decode step. Retracted requests come back before new requests are
admitted. When a request has left the waiting queue its backup is discarded. SGLang doesn't tell
when it leaves, so the shelf looks at the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakSet

from kvtide.errors import KvtideError
from kvtide.plugin.keeper import Backup, Keeper
from kvtide.plugin.sglang.ordinary.allocation import give_slots_back, take_slots
from kvtide.plugin.sglang.ordinary.coverage import refuse_server, why_not
from kvtide.plugin.sglang.ordinary.resume import (
    batch_of,
    bind_to_root,
    has_adapter,
    has_room,
    recount_penalties,
)
from kvtide.plugin.sglang.unseen_results import without_last_tokens

logger = logging.getLogger(__name__)

_SHELVES: dict[Any, Shelf] = {}
"""The shelf of each scheduler in this process; a server has one scheduler."""


@final
class Shelf:
    """The backups of a scheduler's retracted requests, in the order of their retraction."""

    def __init__(self, scheduler: Any, keeper: Keeper) -> None:
        self._scheduler = scheduler
        self._keeper = keeper
        self._backups: dict[Any, Backup] = {}
        self._late: WeakSet[Any] = WeakSet()
        """Requests with penalties that came back and haven't decoded since: see `counting`."""
        self._is_closed = False
        """Whether an unexpected error showed that requests can't come back in this SGLang."""

    def __len__(self) -> int:
        return len(self._backups)

    def keep(self, req: Any) -> None:
        """Saves a request whose slots SGLang will give away, if the request can come back."""
        self._late.discard(req)
        if self._is_closed:
            return
        try:
            reason = why_not(req)
            if reason is None:
                self._backups[req] = self._keeper.save(req)
                return
            self._keeper.decline()
        except KvtideError as error:
            reason = str(error)
        logger.debug("kvtide: request %r will be computed again: %s", req.rid, reason)

    def leave(self, req: Any) -> None:
        """Forgets a request that SGLang removes without its KV."""
        self._late.discard(req)

    def resume(self, running: Any) -> Any:
        """Brings back the requests that fit, the oldest first; returns the running batch with them.

        Brings back none during a chunked prefill, which will need memory that SGLang's estimate
        doesn't include. Requests whose LoRA adapter doesn't fit are skipped.
        """
        self.sweep()
        if self._scheduler.chunked_req is not None:
            return running
        for req in self._in_order():
            try:
                if self.outranking(req):
                    break
                if not has_adapter(self._scheduler, req, running):
                    continue
                if not self._may_come(req, running):
                    break
                has_slots = take_slots(self._scheduler, req)
            except Exception:
                self._close()
                break
            if not has_slots:
                if not running.is_empty() or self._scheduler.last_batch is not None:
                    break
                self._forget(req, "there is no room for it, though nothing runs")
                continue
            batch = self._restored_or_closed(req)
            if self._is_closed:
                break
            running = _joined(running, batch)
        return running

    def read_ahead(self) -> None:
        """Begins to bring back from a tier the backups of those who come back next."""
        self._keeper.read_ahead(self._backups[req] for req in self._in_order())

    def outranking(self, req: Any) -> list[Any]:
        """Waiting requests without a backup whose priority is better than this one's."""
        scheduler = self._scheduler
        if not scheduler.enable_priority_scheduling:
            return []
        sign = scheduler.policy.priority_sign
        waiting = [other for other in scheduler.waiting_queue if other not in self._backups]
        return [other for other in waiting if other.priority * sign < req.priority * sign]

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Inside this context the waiting queue lacks requests that must not be admitted now.

        These are the requests with a backup, which SGLang would compute again, and while there are
        any, all requests that don't outrank them. Gives whether SGLang has any request left.
        """
        scheduler, everybody = self._scheduler, list(self._scheduler.waiting_queue)
        held = self._in_order()
        let_in = self.outranking(held[0]) if held else everybody
        scheduler.waiting_queue = let_in
        shown = set(let_in)
        out = [req for req in everybody if req not in shown]
        try:
            yield bool(let_in) or scheduler.chunked_req is not None
        finally:
            scheduler.waiting_queue = [*out, *scheduler.waiting_queue]

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """SGLang counts a batch's last tokens for penalties inside this context.

        With overlapped scheduling SGLang takes the last known token for the last but one. A request
        that has just come back knows its last token, so the token is hidden here.
        """
        late = [req for req in batch.reqs if req in self._late]
        with without_last_tokens(late):
            yield
        self._late.difference_update(late)

    def sweep(self) -> None:
        """Discards the backups of requests that no longer wait, such as aborted ones."""
        waiting = set(self._scheduler.waiting_queue)
        for req in [req for req in self._backups if req not in waiting]:
            self._forget(req, "it isn't waiting any more")

    def clear(self, reason: str) -> None:
        """Discards all backups; their requests will be computed again."""
        for req in list(self._backups):
            self._forget(req, reason)

    def _in_order(self) -> list[Any]:
        if not self._scheduler.enable_priority_scheduling:
            return list(self._backups)
        sign = self._scheduler.policy.priority_sign
        return sorted(self._backups, key=lambda req: req.priority * sign)

    def _may_come(self, req: Any, running: Any) -> bool:
        scheduler, size = self._scheduler, len(running.reqs)
        if scheduler.get_num_allocatable_reqs(size, running_batch=running) <= 0:
            return False
        bind_to_root(scheduler, req)
        # If no other request runs it may always try: the estimate concerns the other requests.
        return size == 0 or has_room(scheduler, req, running)

    def _restored_or_closed(self, req: Any) -> Any:
        """Like `_restored`, but an unexpected error closes the shelf, not the scheduler."""
        try:
            return self._restored(req)
        except Exception:
            self._close()
            give_slots_back(self._scheduler, req)
            return None

    def _close(self) -> None:
        """Called in the handler of an unexpected error: from now on no request comes back."""
        logger.exception("kvtide: this SGLang takes no request back; all are computed again")
        self._is_closed = True
        self.clear("none can come back")

    def _restored(self, req: Any) -> Any:
        """A batch of the request, which has slots; None if its KV is lost."""
        scheduler = self._scheduler
        try:
            self._keeper.restore(req, self._backups.pop(req))
        except KvtideError as error:
            logger.warning("kvtide: request %r will be computed again: %s", req.rid, error)
            give_slots_back(scheduler, req)
            return None
        batch, is_late = batch_of(scheduler, req), scheduler.enable_overlap
        if recount_penalties(batch, req, is_late=is_late) and is_late:
            self._late.add(req)
        scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
        return batch

    def _forget(self, req: Any, reason: str) -> None:
        logger.debug("kvtide: the backup of request %r is discarded: %s", req.rid, reason)
        self._keeper.discard(self._backups.pop(req))


def _joined(running: Any, batch: Any) -> Any:
    """The running batch, merged with `batch` if that isn't None."""
    if batch is None:
        return running
    if running.is_empty():
        return batch
    running.merge_batch(batch)
    return running


def open_shelf(scheduler: Any, keeper: Keeper) -> None:
    """Opens the shelf of a scheduler: from now on its retracted requests are saved.

    Call this when the scheduler is complete, in a server with KVTIDE_SGLANG_COLOCATED=1. Raises
    Refused, with the reason.
    """
    refuse_server(scheduler)
    _SHELVES[scheduler] = Shelf(scheduler, keeper)


def shelf_of(scheduler: Any) -> Shelf | None:
    """The scheduler's shelf, or None."""
    return _SHELVES.get(scheduler)


def shelf_with(tree_cache: Any) -> Shelf | None:
    """The shelf of the scheduler that has this prefix cache."""
    shelves = list(_SHELVES.items())
    return next((shelf for owner, shelf in shelves if owner.tree_cache is tree_cache), None)
