"""ChunkMoves: moves chunks of vLLM's own host memory to a tier and back, in threads.

vLLM's primary tier has a row of bytes for each chunk, and gives a row away again when it is told
that a move has ended. A tier may hang and answer late. So a read goes to memory of its own first,
and to the row only if nobody has given it up meanwhile; and what is written was sealed before that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import xxhash

from kvtide.errors import KvtideError, SnapshotDamaged, first_line
from kvtide.form import SPAN_BYTES
from kvtide.layout import Layout, Plane
from kvtide.plugin.vllm.timely import TimelyJob, TimelyThreads
from kvtide.seal import Seal, Span
from kvtide.tier import Tier

logger = logging.getLogger(__name__)

Row = tuple[bytes, str, memoryview]
"""A chunk's key, its name in the tier, and its bytes in vLLM's host memory."""


@final
@dataclass(frozen=True, slots=True)
class EndedChunks:
    """A move that has ended: the keys of the chunks that were moved, and of those that weren't."""

    job_id: int
    moved: tuple[bytes, ...]
    missed: tuple[bytes, ...]
    size_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _ChunkMove:
    started: float
    rows: Sequence[Row]
    threads: TimelyThreads
    jobs: list[TimelyJob[bool] | None] = field(default_factory=list)
    """For each row; None where the tier hung already."""
    is_given_up: bool = False

    def has_ended(self) -> bool:
        """Whether no call is under way that may end well."""
        asked = [job for job in self.jobs if job is not None and not job.done()]
        return self.is_given_up or all(self.threads.has_failed(job) for job in asked)


def layout_of(row_bytes: int) -> str:
    """The canonical geometry of a row."""
    layout = Layout("vllm_chunk", Plane("chunk", "page token byte"))
    return layout.bind(dtype="uint8", token=1, byte=row_bytes).canonical


@final
class ChunkMoves:
    """Moves rows of `row_bytes`. A row that takes the tier too long has failed.

    One thread calls, the scheduler's; each call returns at once, except `drain` and `close`.
    """

    def __init__(
        self,
        tier: Tier,
        row_bytes: int,
        readers: TimelyThreads,
        writers: TimelyThreads,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._row_bytes = row_bytes
        self._geometry = layout_of(row_bytes)
        self._readers, self._writers = readers, writers
        self._clock = clock
        self._moves: dict[int, _ChunkMove] = {}
        self._copying = threading.Lock()  # a row is written, or its move is given up
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._moves)

    def store(self, job_id: int, rows: Sequence[Row]) -> None:
        """Begins to write rows to the tier."""
        self._begin(job_id, rows, self._writers, self._write)

    def load(self, job_id: int, rows: Sequence[Row]) -> None:
        """Begins to read rows from the tier, every byte of which is checked before it is there."""
        self._begin(job_id, rows, self._readers, self._read)

    def take_ended(self) -> list[EndedChunks]:
        """The moves that have ended since the last call, or take too long."""
        ended = []
        for job_id, move in list(self._moves.items()):
            if move.has_ended():
                del self._moves[job_id]
                ended.append(self._end(job_id, move))
        return ended

    def take_counts(self) -> Counter[str]:
        """What has happened since the last call, by the names of `messages.COUNTS`."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def drain(self) -> None:
        """Blocks until all moves have ended, or for `deadline_s`; gives up those that haven't."""
        until = time.monotonic() + self._readers.deadline_s
        for move in self._moves.values():
            jobs = [job for job in move.jobs if job is not None]
            move.threads.wait(jobs, max(0.0, until - time.monotonic()))
            self._give_up(move)

    def close(self) -> None:
        """Waits a while for moves, and ends the threads."""
        for threads in (self._writers, self._readers):
            threads.close()
        for move in self._moves.values():
            self._give_up(move)
        self._moves.clear()  # they have views of vLLM's memory

    def _begin(
        self,
        job_id: int,
        rows: Sequence[Row],
        threads: TimelyThreads,
        work: Callable[[_ChunkMove, Row], bool],
    ) -> None:
        move = self._moves[job_id] = _ChunkMove(self._clock(), rows, threads)
        move.jobs = [threads.start(partial(work, move, row)) for row in rows]

    def _end(self, job_id: int, move: _ChunkMove) -> EndedChunks:
        self._give_up(move)
        both = [
            (row[0], job is not None and job.result_or(False))
            for row, job in zip(move.rows, move.jobs, strict=True)
        ]
        for job in move.jobs:
            if job is not None and not job.done():
                move.threads.drop(job)
        moved = tuple(key for key, went_well in both if went_well)
        missed = tuple(key for key, went_well in both if not went_well)
        seconds = self._clock() - move.started
        return EndedChunks(job_id, moved, missed, len(moved) * self._row_bytes, seconds)

    def _give_up(self, move: _ChunkMove) -> None:
        with self._copying:
            move.is_given_up = True

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    # ---- in a thread ---------------------------------------------------------------------

    def _is_wanted(self, move: _ChunkMove) -> bool:
        """Whether its rows still have its chunks: vLLM gives them away once it is given up."""
        with self._copying:
            return not move.is_given_up

    def _write(self, move: _ChunkMove, row: Row) -> bool:
        _, name, content = row
        try:
            is_new = self._is_wanted(move) and not self._tier.contains(name)
            if is_new:
                seal = self._sealed(name, content)
                # What the row gets after this differs from the seal, and so no load takes it.
                if self._is_wanted(move):
                    self._tier.put(name, seal, [content])
            if self._is_wanted(move):
                if is_new:
                    self._count("written_blocks")
                return True
        except KvtideError as error:
            logger.debug("kvtide: a chunk wasn't written: %s", first_line(error))
        except Exception:
            logger.exception("kvtide: a tier failed")
        self._count("failed_writes")
        return False

    def _read(self, move: _ChunkMove, row: Row) -> bool:
        _, name, target = row
        memory = memoryview(bytearray(self._row_bytes))
        try:
            self._tier.get(name, partial(self._room, name, memory))
        except SnapshotDamaged as error:
            logger.warning("kvtide: a chunk in a tier is damaged: %s", first_line(error))
            self._count("damaged_blocks")
            return False
        except KvtideError as error:
            logger.debug("kvtide: no chunk in a tier: %s", first_line(error))
            self._count("missing_blocks")
            return False
        except Exception:
            logger.exception("kvtide: a tier failed")
            return False
        with self._copying:
            if move.is_given_up:
                return False
            target[:] = memory
        self._count("fetched_blocks")
        return True

    def _room(self, name: str, memory: memoryview, seal: Seal) -> list[memoryview]:
        """Raises SnapshotMiss unless a seal is that of such a row with that name."""
        seal.check_target(self._geometry, name, 1)
        seal.check_coverage([self._row_bytes])
        return [memory]

    def _sealed(self, name: str, content: memoryview) -> Seal:
        spans = []
        for first in range(0, self._row_bytes, SPAN_BYTES):
            stop = min(first + SPAN_BYTES, self._row_bytes)
            spans.append(Span(0, first, stop, xxhash.xxh3_64_intdigest(content[first:stop])))
        whole = ((range(1),),)
        return Seal(self._geometry, name, 1, whole, ((),), self._row_bytes, tuple(spans))
