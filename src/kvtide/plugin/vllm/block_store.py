"""BlockStore: a rank's blocks in host memory and in the tier below it.

save    a move off the device → here, sealed → the writer writes it to the tier
load    a move to the device, in which every byte is checked; a bad one makes the load a failed one
fetch   a thread reads and checks the file → here

The scheduler decides what is here (BlockBooks); this class does as it says, and reports what went
otherwise. One thread calls, the worker's; each call returns at once, but for those that wait, and
`close`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from secrets import token_hex
from typing import final

from kvtide.arena import HostArena, Lease
from kvtide.device import Job
from kvtide.errors import ArenaFull, KvtideError, first_line
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.messages import BlockReport, Orders
from kvtide.plugin.vllm.moves import BlockMove, EndedMove, FailedJob, MovePart, Spans
from kvtide.plugin.vllm.reader import Fetched, TierReader
from kvtide.plugin.vllm.timely import TimelyThreads
from kvtide.plugin.vllm.writer import TierWriter
from kvtide.seal import Span
from kvtide.snapshot import Snapshot
from kvtide.tier import Namespace, Tier
from kvtide.tier.workers import ThreadWorkers

logger = logging.getLogger(__name__)

Pairs = Sequence[tuple[bytes, int]]
"""Keys of blocks, and the ids that the blocks have on the device."""
_READS_AT_ONCE = 4
_MOST_WRITES_AT_ONCE = 16
"""A disk syncs the files of many writes together."""


@final
class BlockStore:
    """Keeps blocks of some groups in an arena, and writes them through to a tier.

    `group_of` gives the number of a key's group. A block that takes the tier longer than
    `deadline_s` counts as a miss, and until that read has ended no other begins.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        group_of: Callable[[bytes], int],
        arena: HostArena,
        namespace: Namespace,
        tier: Tier | None = None,
        *,
        deadline_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._group_of = group_of
        self._arena = arena
        self._namespace = namespace
        self._clock = clock
        self._reader: TierReader | None = None
        self._writer: TierWriter | None = None
        if tier is not None:
            self._reader = TierReader(tier, TimelyThreads(_READS_AT_ONCE, deadline_s, clock))
            count = writes_at_once(arena)
            writers = ThreadWorkers(count, deadline_s)
            self._writer = TierWriter(tier, writers, count, deadline_s)
        # On a CPU the copy takes this machine's cores anyway: a thread of its own would only wait.
        self._at_once = all(group.pool.device.torch_device.type == "cpu" for group in groups)
        self._held: dict[bytes, Snapshot] = {}
        self._moves: dict[int, BlockMove] = {}
        self._ended: list[EndedMove] = []
        self._reset_number = 0
        self._report = BlockReport()

    # ---- what the scheduler orders -------------------------------------------------------

    def follow(self, orders: Orders) -> None:
        """Forgets blocks, and begins to fetch others."""
        if orders.reset_number:
            self._forget_all()
            self._reset_number = orders.reset_number
        for key in orders.forget:
            self._forget(key)
        for key in orders.fetch:
            self._begin_fetch(key)

    def save(
        self,
        job_id: int,
        groups: Sequence[Pairs],
        reset_number: int = 0,
        is_valid: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begins to copy blocks off the device; for each group its pairs.

        A save that was ordered before the last reset moves nothing: `reset_number` tells. Nothing
        is kept unless `is_valid` says so when the blocks are here.
        """
        move = self._moves[job_id] = BlockMove(self._clock(), is_load=False, is_valid=is_valid)
        if reset_number != self._reset_number:
            return
        for group, pairs in zip(self._groups, groups, strict=True):
            leased = [(key, block, lease) for key, block in pairs if (lease := self._lease(key))]
            if leased:
                self._begin_part(move, group, *map(list, zip(*leased, strict=True)))

    def load(self, job_id: int, groups: Sequence[Pairs]) -> None:
        """Begins to copy blocks to the device; a byte that is wrong makes the load a failed one."""
        move = self._moves[job_id] = BlockMove(self._clock(), is_load=True)
        for pairs in groups:
            absent = [key for key, _ in pairs if key not in self._held]
            self._report.lost.update(absent)
            move.has_failed = move.has_failed or bool(absent)
        for group, pairs in zip(self._groups, groups, strict=True):
            if pairs and not move.has_failed:
                keys, blocks = map(list, zip(*pairs, strict=True))
                leases = [self._held[key].lease for key in keys]
                self._begin_part(move, group, keys, blocks, leases)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Blocks until these moves have ended; those that aren't known have."""
        for move in [self._moves[job_id] for job_id in job_ids if job_id in self._moves]:
            for part in move.parts:
                try:
                    part.job.wait()
                except Exception as error:
                    logger.debug("kvtide: a move failed: %s", first_line(error))

    def wait_for_fetches(self, at_most_s: float) -> None:
        """Blocks until all fetches have ended, or for so long."""
        if self._reader is not None:
            self._reader.wait(at_most_s)

    # ---- what happened -------------------------------------------------------------------

    def take_ended(self) -> list[EndedMove]:
        """The moves that have ended since the last call."""
        for job_id, move in list(self._moves.items()):
            if all(part.job.done() for part in move.parts):
                del self._moves[job_id]
                self._end_move(job_id, move)
        ended, self._ended = self._ended, []
        return ended

    def take_report(self) -> BlockReport:
        """What happened since the last call, beside the ends of moves."""
        if self._reader is not None:
            for fetched in self._reader.take_ended():
                self._end_fetch(fetched)
        if self._writer is not None:
            self._report.counts += self._writer.take_counts()
        report, self._report = self._report, BlockReport()
        return report

    def close(self) -> None:
        """Waits for moves, and a while for writes. The tier stays open. Repeatable."""
        self.wait(tuple(self._moves))
        self.take_ended()
        for threads in (self._writer, self._reader):
            if threads is not None:
                threads.close()
        self._forget_all()

    # ---- moves ---------------------------------------------------------------------------

    def _lease(self, key: bytes) -> Lease | None:
        """Room for a block; None, and a report, if there is none."""
        self._forget(key)
        lease = Lease(self._arena)
        try:
            lease.extend(1)
            return lease
        except ArenaFull:
            lease.release()
            self._report.lost.add(key)
            self._report.counts["unsaved_blocks"] += 1
            return None

    def _begin_part(
        self,
        move: BlockMove,
        group: BlockGroup,
        keys: list[bytes],
        blocks: list[int],
        leases: list[Lease],
    ) -> None:
        rooms = [lease.blocks[0] for lease in leases]
        size, at_once = group.block_bytes, self._at_once
        job: Job[Spans]
        try:
            rows = group.rows_of(blocks)
            if move.is_load:
                spans = self._spans_of(keys)
                # vLLM gives the blocks of a load to nobody before it has ended well.
                job = group.mover.scatter(
                    *(rooms, rows),
                    chunk_bytes=size,
                    spans=spans,
                    all_or_nothing=False,
                    at_once=at_once,
                    owner=leases,
                )
            else:
                job = group.mover.gather(
                    rows, rooms, chunk_bytes=size, at_once=at_once, owner=leases
                )
        except Exception as error:
            job = FailedJob(error)
        for lease in leases:
            lease.use(job)
        move.parts.append(MovePart(group, keys, job, leases))

    def _spans_of(self, keys: Sequence[bytes]) -> list[Span]:
        """The spans of blocks that move together, each block's in a chunk of its own."""
        return [
            Span(chunk, span.first, span.stop, span.checksum)
            for chunk, key in enumerate(keys)
            for span in self._held[key].seal.spans
        ]

    def _end_move(self, job_id: int, move: BlockMove) -> None:
        size_bytes = 0
        for part in move.parts:
            try:
                spans = part.job.wait()
            except Exception as error:
                move.has_failed = True
                logger.warning("kvtide: a move of blocks failed: %s", first_line(error))
                self._note_failure(move, part)
                continue
            if move.is_forgotten or not move.is_valid():
                self._drop(move, part)
                continue
            size_bytes += len(part.keys) * part.group.block_bytes
            if move.is_load:
                self._report.counts["loaded_blocks"] += len(part.keys)
            else:
                self._keep(part, list(chain.from_iterable(spans)))
        if move.is_load and move.has_failed:
            self._report.counts["failed_loads"] += 1
        seconds = self._clock() - move.started
        self._ended.append(EndedMove(job_id, not move.has_failed, size_bytes, seconds))

    def _keep(self, part: MovePart, spans: Sequence[Span]) -> None:
        """Blocks that were saved are here from now on."""
        by_chunk: list[list[Span]] = [[] for _ in part.keys]
        for span in spans:
            by_chunk[span.chunk].append(span)
        for key, lease, found in zip(part.keys, part.leases, by_chunk, strict=True):
            name = self._name_of(key)
            snapshot = self._held[key] = Snapshot(part.group.seal_of(name, found), lease)
            self._report.counts["saved_blocks"] += 1
            if self._writer is not None:
                self._writer.offer(name, snapshot)

    def _note_failure(self, move: BlockMove, part: MovePart) -> None:
        """Drops the blocks of a part that failed; of a load only the damaged, if any is."""
        if move.is_forgotten or not move.is_load:
            self._drop(move, part)
            return
        # The error names one damaged block. Each that stayed would cost another request its load.
        # And a load that failed before this one may have dropped the block that was damaged.
        here = [key for key in part.keys if key in self._held]
        damaged = [key for key in here if not self._is_whole(key)]
        self._report.counts["damaged_blocks"] += len(damaged)
        is_explained = damaged or len(here) < len(part.keys)
        for key in damaged if is_explained else here:
            self._forget(key)
            self._report.lost.add(key)

    def _drop(self, move: BlockMove, part: MovePart) -> None:
        """Keeps no block of such a save: it failed, isn't valid, or a reset forgot it."""
        move.has_failed = True
        if move.is_load:
            return
        for lease in part.leases:
            lease.release()
        self._report.counts["unsaved_blocks"] += len(part.keys)
        if not move.is_forgotten:
            self._report.lost.update(part.keys)

    def _is_whole(self, key: bytes) -> bool:
        try:
            self._held[key].verify()
        except KvtideError:
            return False
        return True

    # ---- fetches -------------------------------------------------------------------------

    def _begin_fetch(self, key: bytes) -> None:
        if key in self._held:
            self._report.fetched[key] += 1
            return
        lease = Lease(self._arena)
        group, name = self._groups[self._group_of(key)], self._name_of(key)
        has_begun = False
        with suppress(ArenaFull):
            lease.extend(1)
            has_begun = self._reader is not None and self._reader.begin(key, group, name, lease)
        if not has_begun:
            lease.release()
            self._note_missing(key)

    def _end_fetch(self, fetched: Fetched) -> None:
        self._report.counts["damaged_blocks"] += fetched.is_damaged
        if fetched.snapshot is None:
            self._note_missing(fetched.key)
            return
        self._held[fetched.key] = fetched.snapshot
        self._report.fetched[fetched.key] += 1
        self._report.counts["fetched_blocks"] += 1

    def _note_missing(self, key: bytes) -> None:
        self._report.missing.add(key)
        self._report.counts["missing_blocks"] += 1

    # ---- books ---------------------------------------------------------------------------

    def _name_of(self, key: bytes) -> str:
        return self._namespace.key_of(key.hex())

    def _forget(self, key: bytes) -> None:
        if self._reader is not None:
            self._reader.withdraw(key)
        snapshot = self._held.pop(key, None)
        if snapshot is not None:
            if self._writer is not None:
                self._writer.withdraw(snapshot.seal.key)
            snapshot.lease.release()

    def _forget_all(self) -> None:
        """Forgets all blocks, and takes other names from now on: weights may have changed."""
        if self._reader is not None:
            self._reader.withdraw_all()
        for key in tuple(self._held):
            self._forget(key)
        for move in self._moves.values():
            move.is_forgotten = True
        self._namespace = replace(
            self._namespace, engine=f"{self._namespace.engine} {token_hex(16)}"
        )


def writes_at_once(arena: HostArena) -> int:
    """How many blocks are written side by side: these can't leave the arena meanwhile."""
    return max(1, min(_MOST_WRITES_AT_ONCE, arena.block_count // 8))
