"""Keeper: what kvtide does for the scheduler of an engine, in kvtide's own words.

One for each scheduler process, over the pools of its rank:

    keeper = Keeper(description, tide, requests, ranks)
    backup = keeper.save(request)        # before the engine gives the request's slots away
    keeper.restore(request, backup)      # once it has slots again; the backup is gone then
    keeper.discard(backup)               # aborted instead

It decides nothing about requests: errors say what happened, and the caller what becomes of the
request. Ranks that schedule together must decide alike, so they agree: a request is saved, or
restored, by all of them or by none.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from kvtide.arena import HostArena
from kvtide.errors import KvtideError, SlotsLost
from kvtide.plugin.books import Counters
from kvtide.plugin.description import Description
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import DeviceFailed, RankFailed, StateAhead, reason_of
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide

logger = logging.getLogger(__name__)


class Requests(ABC):
    """What a keeper asks about a request. The keeper never looks into the request itself."""

    @abstractmethod
    def id_of(self, request: Any) -> str:
        """Its name in the log. A backup is restored to a request of the same name only."""

    @abstractmethod
    def slots_of(self, request: Any) -> torch.Tensor:
        """The slots of its tokens that have KV, [token], on the CPU, in the order of the tokens.

        Raises a KvtideError where they aren't known.
        """

    def rows_of(self, request: Any) -> Mapping[str, int]:
        """The request's own rows, of the kinds that the pool has (`Description.request_kinds`).

        Raises a KvtideError where the request has rows that the description doesn't know of.
        """
        return {}

    def is_ahead(self, request: Any) -> bool:
        """Whether its recurrent state is a step ahead of its answer. Then no save is possible."""
        return False


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
class Keeper:
    """Saves and restores requests of one scheduler. Not thread-safe: the scheduler's thread calls.

    `counters` are read by the metrics, `description` says what is moved.
    """

    def __init__(
        self,
        description: Description,
        tide: Tide,
        requests: Requests,
        ranks: Ranks | None = None,
    ) -> None:
        """`tide.pool` is the pool that `description` adopted. Without `ranks` there is one rank."""
        self.description = description
        self.tide = tide
        self.counters = Counters()
        self.draft_refusal = ""
        """Why the draft model's KV isn't kept: the answers stay right, guesses get worse."""
        self._requests = requests
        self._ranks = ranks or Ranks()
        self._changed: Callable[[Keeper], None] = lambda keeper: None

    @property
    def token_bytes(self) -> int:
        """Bytes that a token owns on this rank; state that a request owns as a whole aside."""
        return self.tide.pool.geometry.token_bytes

    @property
    def request_kinds(self) -> frozenset[str]:
        """The kinds of rows that a request has of its own on this rank."""
        return self.tide.pool.request_kinds

    @property
    def arena(self) -> HostArena:
        """The host memory: its limit and its use."""
        return self.tide.arena

    def save(self, request: Any) -> Backup:
        """Copies what the request owns to the arena; its slots may be given away afterwards.

        Blocks until it is done, and first until nothing on the device writes these slots any more.
        Raises ArenaFull, SlotError, StateAhead, RankFailed or DeviceFailed; nothing is kept of it
        then.
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
        """Writes a backup to the slots that the request has now, and discards it, well or badly.

        Blocks until it is done. Raises SnapshotDamaged, SnapshotMiss, SlotError, SlotsLost,
        RankFailed or DeviceFailed: then the request has no KV, and must not go on.
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
        """The move's result, or its error of any kind: the other ranks wait to hear how it went."""
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
        """This rank's error; if only another rank has one, an error with the text `otherwise`."""
        if self._ranks.agree(error is None) or error is not None:
            return error
        return RankFailed(otherwise)

    def _counted(self, counts: Counter[str], error: KvtideError | None) -> KvtideError:
        assert error is not None, "a move has a result or an error"
        counts[reason_of(error)] += 1
        self._tell()
        return error

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
