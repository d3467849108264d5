"""Keeper: what kvtide does for a scheduler of SGLang's, in kvtide's own words.

One for each scheduler process, over the pools of its rank:

    keeper = Keeper.of(allocator, request_pool, draft_pools, settings)   # or Refused
    backup = keeper.save(req)            # before SGLang gives the request's slots away
    keeper.restore(req, backup)          # once it has slots again; the backup is gone then
    keeper.discard(backup)               # aborted instead

It decides nothing about requests: errors say what happened, and the caller what becomes of the
request. Ranks that schedule in step must decide alike, so they `agree`: a request is saved, or
restored, by all of them or by none.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from kvtide.arena import HostArena
from kvtide.arena.budget import block_bytes_for
from kvtide.device import Device, open_device
from kvtide.errors import (
    ArenaFull,
    KvtideError,
    LayoutError,
    SlotError,
    SlotsLost,
    SnapshotDamaged,
    SnapshotMiss,
)
from kvtide.plugin.description import Description, Refused
from kvtide.plugin.host_memory import Measure, gather_alone, limit_bytes_of, measure_with
from kvtide.plugin.reader import Table
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.requests import rows_of_request
from kvtide.plugin.sglang.rules import LastTokens, window_of
from kvtide.plugin.sglang.settings import Settings
from kvtide.pool import Pool
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide

logger = logging.getLogger(__name__)

READS: Table = {
    "KVCache": ("device",),
    "ReqToTokenPool": ("req_to_token",),
    "DecodeReqToTokenPool": ("req_to_token",),
    "Req": ("rid", "kv", "seqlen"),
    "ReqKvInfo": ("req_pool_idx",),
}
"""Read by name: a request pool of another class will do as well, if it has the table."""

Agree = Callable[[bool], bool]
"""Whether it went well on every rank that schedules in step with this one, which all ask."""


class RankFailed(KvtideError):
    """Another rank couldn't save or restore its share, so this one doesn't either."""


class StateAhead(KvtideError):
    """A request's recurrent state has taken a step that its answer hasn't: see `pending`."""


class DeviceFailed(KvtideError):
    """The device, or kvtide itself, failed in the middle of a move."""


_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (ArenaFull, "arena_full"),
    (SnapshotDamaged, "damaged"),
    (SnapshotMiss, "missing"),
    (SlotError, "slots"),
    (LayoutError, "layout"),
    (StateAhead, "request"),
    (RankFailed, "other_rank"),
    (SlotsLost, "slots_lost"),
    (DeviceFailed, "device"),
)
REASONS = tuple(reason for _, reason in _REASONS)
"""All that `reason_of` gives; `request`: of a kind that can't come back. A metric's label."""


def reason_of(error: KvtideError) -> str:
    """An error of a keeper's in a word, for counting."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "device")


@final
@dataclass(frozen=True, slots=True)
class Backup:
    """A request's KV and state in this rank's arena, until it is restored or discarded."""

    request_id: str
    snapshot: Snapshot

    @property
    def token_count(self) -> int:
        """Tokens in it: all of the request's that had KV when it was saved."""
        return self.snapshot.token_count

    @property
    def size_bytes(self) -> int:
        """What it takes of the arena's limit; 0 once it is restored or discarded."""
        return self.snapshot.size_bytes


@final
@dataclass(slots=True)
class Counters:
    """What happened so far on this rank. Seconds are those that the scheduler was held up."""

    saves: int = 0
    restores: int = 0
    discards: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_s: float = 0.0
    restore_s: float = 0.0
    refused_saves: Counter[str] = field(default_factory=Counter)
    """Saves that raised, by `reason_of` the error."""
    failed_restores: Counter[str] = field(default_factory=Counter)
    """Restores that raised, likewise."""

    @property
    def retractions(self) -> int:
        """Requests that were to be saved, whether they were or not."""
        return self.saves + self.refused_saves.total()


@final
class Keeper:
    """Saves and restores requests of one scheduler. Not thread-safe: the scheduler's thread calls.

    `counters` are read by the metrics, `description` says what is moved.
    """

    def __init__(
        self,
        description: Description,
        tide: Tide,
        request_pool: Any,
        agree: Agree = lambda went_well: went_well,
        is_ahead: Callable[[Any], bool] = lambda req: False,
    ) -> None:
        """For `of`, and for tests."""
        self.description = description
        self.tide = tide
        self.counters = Counters()
        self.draft_refusal = ""
        """Why the draft model's KV isn't kept: the answers stay right, guesses get worse."""
        self._request_pool = request_pool
        self._agree = agree
        self._is_ahead = is_ahead
        self._kinds = tide.pool.request_kinds
        self._window = _window_of(description)
        self._changed: Callable[[Keeper], None] = lambda keeper: None

    @classmethod
    def of(
        cls,
        allocator: Any,
        request_pool: Any,
        draft_pools: Sequence[Any],
        settings: Settings,
        agree: Agree = lambda went_well: went_well,
        agree_on_limit: Callable[[int], int] = lambda limit_bytes: limit_bytes,
        measure: Measure | None = None,
        window_tokens: int | None = None,
        is_ahead: Callable[[Any], bool] = lambda req: False,
    ) -> Keeper:
        """A keeper of the allocator's pool and the draft model's, which share its slots.

        `request_pool` is SGLang's req_to_token_pool. `measure` says how much memory the ranks of
        this host leave, and is asked exactly once; after it `agree_on_limit`, which gives the
        least of what the ranks that schedule in step have for their arenas, with -1 where a rank
        refuses. A draft pool that is refused is left out: `draft_refusal` says why.
        `window_tokens` is how far sliding-window attention looks back, where there is any, and
        `is_ahead` says whether a request is part of a step whose result is on its way.
        Raises Refused, LayoutError where the pool's tensors can't be copied exactly, RankFailed
        where another rank refused; nothing is held then.
        """
        if not isinstance(getattr(request_pool, "req_to_token", None), torch.Tensor):
            name = type(request_pool).__name__
            raise Refused(f"{name} has no table 'req_to_token': where a request lies isn't known")
        pool = allocator.get_kvcache()
        device = open_device(torch.device(pool.device).type)
        subject = Subject(pool, allocator, request_pool, window_tokens)
        measure = measure or measure_with(gather_alone, settings.rank_count)
        try:
            try:
                description, adopted, draft_refusal = _adopt(subject, draft_pools, device)
            except BaseException:
                measure(0)  # the other ranks are waiting to hear
                agree_on_limit(-1)
                raise
            limit_bytes = agree_on_limit(limit_bytes_of(adopted, settings, measure))
            if limit_bytes < 0:
                raise RankFailed(f"{description.name}: refused on another rank, whose log says why")
            block_bytes = block_bytes_for(adopted, limit_bytes)
            arena = HostArena(device, limit_bytes=limit_bytes, block_bytes=block_bytes)
            keeper = cls(description, Tide(adopted, arena), request_pool, agree, is_ahead)
        except BaseException:
            device.close()
            raise
        keeper.draft_refusal = draft_refusal
        return keeper

    @property
    def token_bytes(self) -> int:
        """Bytes that a token owns on this rank; state that a request owns as a whole aside."""
        return self.tide.pool.geometry.token_bytes

    @property
    def has_recurrent_state(self) -> bool:
        """Whether a request owns state that each of its steps changes: see `pending`."""
        return "mamba" in self._kinds

    @property
    def arena(self) -> HostArena:
        """The host memory: its limit and its use."""
        return self.tide.arena

    def save(self, req: Any) -> Backup:
        """Copies what the request owns to the arena; its slots may be given away afterwards.

        Those are the slots of its first `seqlen - 1` tokens: the last one has no KV yet. Blocks
        until it is done, and first until nothing on the device writes these slots any more.
        Raises ArenaFull, SlotError, StateAhead, RankFailed or DeviceFailed; nothing is kept of it
        then.
        """
        began, before = time.perf_counter(), self.tide.stats.offloaded_bytes
        snapshot, error = self._try(lambda: self._offload(req))
        error = self._agreed(error, f"request {req.rid}: another rank couldn't save its share")
        if error is not None or snapshot is None:
            if snapshot is not None:
                self.tide.discard(snapshot)
            raise self._counted(self.counters.refused_saves, error)
        seconds = time.perf_counter() - began
        moved = self.tide.stats.offloaded_bytes - before
        self.counters.saves += 1
        self.counters.saved_bytes += moved
        self.counters.save_s += seconds
        self._log("saved", req.rid, snapshot.token_count, moved, seconds)
        self._tell()
        return Backup(req.rid, snapshot)

    def restore(self, req: Any, backup: Backup) -> None:
        """Writes a backup to the slots that the request has now, and discards it, well or badly.

        Blocks until it is done. Raises SnapshotDamaged, SnapshotMiss, SlotError, SlotsLost,
        RankFailed or DeviceFailed: then the request has no KV, and must not go on.
        """
        began, before = time.perf_counter(), self.tide.stats.restored_bytes
        token_count = backup.token_count
        _, error = self._try(lambda: self._restore(req, backup))
        self.tide.discard(backup.snapshot)
        error = self._agreed(error, f"request {req.rid}: another rank couldn't restore its share")
        if error is not None:
            raise self._counted(self.counters.failed_restores, error)
        seconds = time.perf_counter() - began
        moved = self.tide.stats.restored_bytes - before
        self.counters.restores += 1
        self.counters.restored_bytes += moved
        self.counters.restore_s += seconds
        self._log("restored", req.rid, token_count, moved, seconds)
        self._tell()

    def discard(self, backup: Backup) -> None:
        """Forgets a backup whose request won't come back. Repeatable."""
        if not backup.snapshot.lease.released:
            self.counters.discards += 1
            logger.debug("kvtide discarded request %r", backup.request_id)
        self.tide.discard(backup.snapshot)
        self._tell()

    def decline(self) -> None:
        """Counts a request that wasn't saved since it is of a kind that can't come back."""
        self.counters.refused_saves["request"] += 1
        self._tell()

    def _tell(self) -> None:
        """Lets whoever follows see the counters; what fails there is no failure of a move."""
        try:
            self._changed(self)
        except Exception:
            logger.exception("kvtide: counters can't be followed any more")
            self._changed = lambda keeper: None

    def follow(self, changed: Callable[[Keeper], None]) -> None:
        """From now on `changed` is called with this keeper after each of its moves, and now."""
        self._changed = changed
        changed(self)

    def close(self) -> None:
        """Waits for what is under way, and frees what the device holds. Repeatable."""
        self.tide.close()
        self.tide.pool.device.close()

    # ---- one move, on this rank alone -------------------------------------------------

    def _offload(self, req: Any) -> Snapshot:
        if self.has_recurrent_state and self._is_ahead(req):
            raise StateAhead("its recurrent state is a step ahead of its answer")
        # SGLang's forward stream may still be writing these slots, and this thread isn't on it.
        self._synchronise()
        return self.tide.offload(self._slots(req), key=req.rid, request=self._rows(req))

    def _restore(self, req: Any, backup: Backup) -> None:
        self._synchronise()
        self.tide.restore(backup.snapshot, self._slots(req), key=req.rid, request=self._rows(req))

    def _try(self, move: Callable[[], Any]) -> tuple[Any, KvtideError | None]:
        """The move's result, or its error: whatever it is, the other ranks wait for the news."""
        try:
            return move(), None
        except KvtideError as error:
            if isinstance(error, SlotsLost):
                logger.exception("kvtide: a move failed")
            return None, error
        except Exception as error:
            logger.exception("kvtide: a move failed")
            failed = DeviceFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            return None, failed

    def _agreed(self, error: KvtideError | None, otherwise: str) -> KvtideError | None:
        """This rank's error, or where another rank has one an error that says `otherwise`."""
        if self._agree(error is None) or error is not None:
            return error
        return RankFailed(otherwise)

    def _counted(self, counts: Counter[str], error: KvtideError | None) -> KvtideError:
        assert error is not None, "a move has a result or an error"
        counts[reason_of(error)] += 1
        self._tell()
        return error

    def _slots(self, req: Any) -> torch.Tensor:
        """The slots of the request's tokens that have KV, or of those in its window, [token]."""
        table: torch.Tensor = self._request_pool.req_to_token
        token_count = req.seqlen - 1
        # In a model of windows alone, the slots of earlier tokens are somebody else's by now.
        first = 0 if self._window is None else self._window.first(token_count)
        return table[req.kv.req_pool_idx, first:token_count].cpu()

    def _rows(self, req: Any) -> Mapping[str, int]:
        """The request's own rows, of the kinds that the pool has."""
        return rows_of_request(req, self.description, self._kinds)

    def _synchronise(self) -> None:
        """Waits for all that this process gave the device to do, on whatever stream."""
        device = self.tide.pool.device.torch_device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _log(self, done: str, request_id: str, tokens: int, size: int, seconds: float) -> None:
        logger.debug(
            "kvtide %s request %r: %d tokens, %d bytes, %.2f ms; arena %d of %d bytes",
            done, request_id, tokens, size, seconds * 1e3,
            self.arena.used_bytes, self.arena.limit_bytes,
        )  # fmt: skip


def _window_of(description: Description) -> LastTokens | None:
    """What leaves out all but the last tokens of a request, if all of its parts do."""
    parts = [part for part in description.parts if any(one.numel() for one in part.tensors)]
    return window_of(part.rules for part in parts)


def _adopt(
    subject: Subject, draft_pools: Sequence[Any], device: Device
) -> tuple[Description, Pool, str]:
    """The pool with those of the draft, or without them and the reason."""
    refusal = ""
    if draft_pools:
        from kvtide.plugin.sglang.pools.draft_model import describe_with_draft

        try:
            description = describe_with_draft(subject, draft_pools)
            return description, description.adopt(device), ""
        except KvtideError as error:
            refusal = str(error)
    description = describe(subject)
    return description, description.adopt(device), refusal
