"""Keeper: saves and restores requests for an engine's scheduler.

Each scheduler process has a keeper, over the pools of its rank:

    keeper = Keeper(description, tide, requests, ranks)
    backup = keeper.save(request)        # before the engine gives the request's slots away
    keeper.restore(request, backup)      # once it has slots again; the backup is gone then
    keeper.discard(backup)               # aborted instead

A keeper raises errors; its caller decides what happens to the request. Ranks that schedule in step
must decide alike. So they agree: all of them save or restore a request, or none does.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, final

import torch

from kvtide.arena import HostArena
from kvtide.errors import KvtideError, SlotsLost
from kvtide.plugin.counters import Counters
from kvtide.plugin.description import Description
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import DeviceFailed, RankFailed, StateAhead, reason_of
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import Spill, Store

logger = logging.getLogger(__name__)

_TELL_S = 1.0
"""Seconds after which the counts of tiers, which move in the background, are told again."""
_READ_AHEAD_COUNT = 2
"""While a disk reads the first of them, nothing should wait to ask for the second."""


class Requests(ABC):
    """What a keeper must know about an engine's requests."""

    @abstractmethod
    def id_of(self, request: Any) -> str:
        """The request's name in the log. A backup is only restored to the request of its name."""

    @abstractmethod
    def slots_of(self, request: Any) -> torch.Tensor:
        """The slots of the tokens that have KV, [token], on the CPU, in the order of the tokens.

        Raises a KvtideError if they are unknown.
        """

    def rows_of(self, request: Any) -> Mapping[str, int]:
        """The rows of the request, by the kinds that the pool has (`Description.request_kinds`).

        Raises a KvtideError if the request has rows that aren't in the description.
        """
        return {}

    def is_ahead(self, request: Any) -> bool:
        """Whether its recurrent state is a step ahead of its answer. Then it isn't saved."""
        return False


@final
@dataclass(frozen=True, slots=True)
class Backup:
    """A request's KV and state on this rank, until it is restored or discarded.

    It is in the arena, or in a tier below it.
    """

    request_id: str
    snapshot: Snapshot

    @property
    def token_count(self) -> int:
        """How many tokens it has: all that had KV when the request was saved."""
        return self.snapshot.token_count

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena's limit that it takes; 0 while only a tier has it, and at its end."""
        return self.snapshot.size_bytes


@final
class Keeper:
    """Saves and restores requests of a scheduler. Not thread-safe: the scheduler's thread calls.

    The metrics read `counters`. `description` describes the pool.
    """

    def __init__(
        self,
        description: Description,
        tide: Tide,
        requests: Requests,
        ranks: Ranks | None = None,
        store: Store | None = None,
    ) -> None:
        """`tide.pool` is the pool of the description. Without `ranks` the keeper is alone.

        `close` also closes the `store`, which has the tide's arena and the disk below it.
        """
        self.store = store
        self.description = description
        self.tide = tide
        self.counters = Counters()
        self.draft_refusal = ""
        """Why the draft model's KV isn't kept. Answers stay right; only its guesses get worse."""
        self._requests = requests
        self._ranks = ranks or Ranks()
        self._changed: Callable[[Keeper], None] = lambda keeper: None
        self._told_at = float("-inf")

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on this rank, without the state of the request."""
        return self.tide.pool.geometry.token_bytes

    @property
    def request_kinds(self) -> frozenset[str]:
        """The kinds of rows that belong to a request on this rank."""
        return self.tide.pool.request_kinds

    @property
    def arena(self) -> HostArena:
        """The host memory: its limit and its use."""
        return self.tide.arena

    @property
    def spill(self) -> Spill | None:
        """What moves backups to tiers and back; None if nothing is below the arena."""
        return None if self.store is None else self.store.spill

    def save(self, request: Any) -> Backup:
        """Copies the rows of a request to the arena. Its slots may be given away afterwards.

        Blocks until the copy is done; it begins when nothing on the device writes these slots any
        more. Raises ArenaFull, SlotError, StateAhead, RankFailed or DeviceFailed; then nothing is
        kept in the arena.
        """
        began, before = time.perf_counter(), self.tide.stats.offloaded_bytes
        name = self._requests.id_of(request)
        snapshot, error = self._try(lambda: self._offload(name, request))
        error = self._agreed(error, f"request {name}: another rank couldn't save its share")
        if error is not None or snapshot is None:
            if snapshot is not None:
                self.tide.discard(snapshot)
            raise self._counted(self.counters.refused_saves, error)
        seconds = time.perf_counter() - began
        moved = self.tide.stats.offloaded_bytes - before
        self.counters.saved(moved, seconds)
        self._log("saved", name, snapshot.token_count, moved, seconds)
        self._tell()
        return Backup(name, snapshot)

    def restore(self, request: Any, backup: Backup) -> None:
        """Writes a backup to the request's present slots, and discards it, also after an error.

        Blocks until the copy is done; if a tier has it, also for the tier, for a time. Raises
        SnapshotDamaged, SnapshotMiss, ArenaFull, SlotError, SlotsLost, RankFailed or DeviceFailed.
        Then the request has no KV and must not go on.
        """
        began, before = time.perf_counter(), self.tide.stats.restored_bytes
        name, token_count = self._requests.id_of(request), backup.token_count
        _, error = self._try(lambda: self._restore(name, request, backup))
        self.tide.discard(backup.snapshot)
        error = self._agreed(error, f"request {name}: another rank couldn't restore its share")
        if error is not None:
            raise self._counted(self.counters.failed_restores, error)
        seconds = time.perf_counter() - began
        moved = self.tide.stats.restored_bytes - before
        self.counters.restored(moved, seconds)
        self._log("restored", name, token_count, moved, seconds)
        self._tell()

    def discard(self, backup: Backup) -> None:
        """Discards a backup whose request won't come back. Repeatable."""
        if backup.snapshot.is_held:
            self.counters.discards += 1
            logger.debug("kvtide discarded request %r", backup.request_id)
        self.tide.discard(backup.snapshot)
        self._tell()

    def read_ahead(self, waiting: Iterable[Backup]) -> None:
        """Begins to bring back from a tier what is restored next, the first of `waiting`.

        Call this in each step, also if nobody waits: files of requests that are gone are removed
        then. Doesn't block and doesn't raise. It is a hint, so the ranks needn't agree.
        """
        spill = self.spill
        if spill is None:
            return
        self._try(spill.settle)
        for backup in islice(waiting, _READ_AHEAD_COUNT):
            self._try(partial(spill.read_ahead, backup.snapshot))
        now = time.monotonic()
        if now >= self._told_at + _TELL_S:
            self._told_at = now
            self._tell()

    def decline(self) -> None:
        """Counts a request that isn't saved, because requests of its kind can't come back."""
        self.counters.refused_saves["request"] += 1
        self._tell()

    def _tell(self) -> None:
        """Calls the follower of the counters. An error there doesn't fail the move."""
        try:
            self._changed(self)
        except Exception:
            logger.exception("kvtide: counters can't be followed any more")
            self._changed = lambda keeper: None

    def follow(self, changed: Callable[[Keeper], None]) -> None:
        """Calls `changed` with this keeper now, and from now on after each of its moves."""
        self._changed = changed
        changed(self)

    def close(self) -> None:
        """Waits for all moves, and closes the store and the device. Repeatable."""
        self.tide.close()
        if self.store is not None:
            self.store.close()
        self.tide.pool.device.close()

    # ---- a single move, on this rank ---------------------------------------------------

    def _offload(self, name: str, request: Any) -> Snapshot:
        if self._requests.is_ahead(request):
            raise StateAhead("its recurrent state is a step ahead of its answer")
        # The engine's forward stream may still write these slots, and this thread isn't on it.
        self._synchronise()
        slots, rows = self._requests.slots_of(request), self._requests.rows_of(request)
        return self.tide.offload(slots, key=name, request=rows)

    def _restore(self, name: str, request: Any, backup: Backup) -> None:
        self._synchronise()
        slots, rows = self._requests.slots_of(request), self._requests.rows_of(request)
        self.tide.restore(backup.snapshot, slots, key=name, request=rows)

    def _try(self, move: Callable[[], Any]) -> tuple[Any, KvtideError | None]:
        """The move's result or its error. It never raises: the other ranks wait for this rank."""
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
        """This rank's error, or RankFailed(`otherwise`) if only another rank has an error."""
        if self._ranks.agree(error is None) or error is not None:
            return error
        return RankFailed(otherwise)

    def _counted(self, counts: Counter[str], error: KvtideError | None) -> KvtideError:
        assert error is not None, "a move has a result or an error"
        counts[reason_of(error)] += 1
        self._tell()
        return error

    def _synchronise(self) -> None:
        """Waits for all work of this process on the device, on all streams."""
        device = self.tide.pool.device.torch_device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _log(self, done: str, request_id: str, tokens: int, size: int, seconds: float) -> None:
        logger.debug(
            "kvtide %s request %r: %d tokens, %d bytes, %.2f ms; arena %d of %d bytes",
            done, request_id, tokens, size, seconds * 1e3,
            self.arena.used_bytes, self.arena.limit_bytes,
        )  # fmt: skip
