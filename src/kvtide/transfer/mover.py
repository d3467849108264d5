"""Mover: plans the copies between a pool and blocks, binds them and submits them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain
from operator import or_
from typing import Any, final

import torch

from kvtide.device import Block, Job, Step
from kvtide.errors import SlotsLost, first_line
from kvtide.form import Section, sections_of
from kvtide.layout import Ids
from kvtide.pool import Pool
from kvtide.seal import Span
from kvtide.transfer.bind import (
    bits_of,
    joined,
    memories_of,
    numpy_element,
    step_of,
    suits_numpy,
    torch_element,
    view_of,
)
from kvtide.transfer.plan import (
    BufferPlan,
    BufferSet,
    ChunkPlan,
    buffer_sets,
    plan_in_parts,
)
from kvtide.transfer.run import Copier, DeviceCopier, HostCopier, Task

# The most views of buffers that are cached; each takes some hundred bytes.
_MOST_VIEWS = 4096
# Chunk sizes whose sections are kept: the arena's, and the ones of snapshots from elsewhere.
_MOST_CHUNK_SIZES = 16
# How many spans a lane checks at a time: enough that handing them over costs little.
_STEP_SPANS = 4

_Phases = Iterator[Sequence[Step[list[Span]]]]


@final
class Mover:
    """Copies rows between a pool and host blocks; each chunk of rows has a block.

    It copies bytes, so every dtype moves, NaN payloads included. The rows must be checked
    (`Pool.rows_of`), an array for each group of planes. A chunk of up to `chunk_bytes` fills the
    beginning of its block, uint8 [block_bytes]. Both directions return a job, which may have ended
    already if `at_once` was given.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._in_memory = [suits_numpy(buffer) for buffer in pool.buffers]
        self._bits = [bits_of(buffer) for buffer in pool.buffers]
        self._views: dict[tuple[object, ...], Any] = {}
        self._sections: dict[int, list[tuple[Section, list[BufferSet]]]] = {}

    def sections(self, chunk_bytes: int) -> list[Section]:
        """The geometry's sections. Raises LayoutError if a row can't be split to fit a chunk."""
        return [section for section, _ in self._bound_sections(chunk_bytes)]

    def chunk_count(self, rows: Sequence[Ids], chunk_bytes: int) -> int:
        """How many chunks, and so blocks, these rows of each group of planes need."""
        sections = self.sections(chunk_bytes)
        return sum(section.chunk_count(rows[section.group].size) for section in sections)

    def gather(
        self,
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        *,
        chunk_bytes: int,
        seal: bool = True,
        at_once: bool = False,
        owner: object = None,
    ) -> Job[list[list[Span]]]:
        """Copies rows to blocks. The job's results are the spans of the chunks, in order.

        Without `seal`, for benchmarks, they are empty. `at_once`: see Device.submit. Until the job
        has ended the blocks belong to it, and the rows must not be written. The job keeps `owner`,
        the owner of the blocks, alive until then.
        """
        phases = partial(self._gather_phases, rows, blocks, chunk_bytes, seal, owner)
        return self._submit(phases, rows, blocks, chunk_bytes, at_once)

    def _gather_phases(
        self,
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        chunk_bytes: int,
        seal: bool,
        owner: object,
    ) -> _Phases:
        _ = owner  # the job holds it with these arguments
        for tasks in self._tasks(rows, blocks, memories_of(blocks), chunk_bytes):
            if seal:
                yield [Step(task.seal, task.gather_hashing) for task in tasks]
            else:
                yield [Step(_nothing, task.gather) for task in tasks]

    def scatter(
        self,
        blocks: Sequence[Block],
        rows: Sequence[Ids],
        *,
        chunk_bytes: int,
        spans: Sequence[Span],
        all_or_nothing: bool = True,
        at_once: bool = False,
        owner: object = None,
    ) -> Job[list[list[Span]]]:
        """Checks all `spans` of the blocks, then copies the blocks to rows.

        The job raises SnapshotDamaged, which names the first bad span, before anything is written,
        and SlotsLost if the device fails while it writes. Bytes in no span aren't checked: see
        `Seal.check_coverage`. The blocks and the rows belong to the job until it has ended.
        `at_once`: see Device.submit; `owner`: see `gather`.

        Without `all_or_nothing` a span is checked right after its copy, while it is in the cache,
        so that the blocks are read from memory once, not twice. A bad span raises SlotsLost, too.
        That is only for rows that nobody reads unless the job has ended well.
        """
        writing: list[bool] = []
        phases = partial(
            self._scatter_phases,
            *(blocks, rows, chunk_bytes, spans, all_or_nothing, writing.append, owner),
        )
        return _WritingJob(self._submit(phases, rows, blocks, chunk_bytes, at_once), writing)

    def _scatter_phases(
        self,
        blocks: Sequence[Block],
        rows: Sequence[Ids],
        chunk_bytes: int,
        spans: Sequence[Span],
        all_or_nothing: bool,
        note_writing: Callable[[bool], None],
        owner: object,
    ) -> _Phases:
        _ = owner  # the job holds it with these arguments
        memories = memories_of(blocks)
        if spans and all_or_nothing:
            yield _checks(spans, memories)
        unchecked: list[deque[Span]] = [deque() for _ in blocks]
        for span in () if all_or_nothing else spans:
            unchecked[span.chunk].append(span)
        for tasks in self._tasks(rows, blocks, memories, chunk_bytes):
            for task in tasks:
                task.take_from(unchecked)
            note_writing(True)
            yield [Step(task.check, task.scatter_checking) for task in tasks]
        if left := list(chain.from_iterable(unchecked)):
            yield _checks(left, memories)

    def _tasks(
        self,
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        memories: Sequence[memoryview],
        chunk_bytes: int,
    ) -> Iterator[list[Task]]:
        """Plans and binds the tasks of a request, part by part. The device runs them."""
        device = self._pool.device
        for plans in plan_in_parts(
            self._bound_sections(chunk_bytes),
            rows,
            call_bytes=device.move_bytes,
            task_bytes=device.chunk_bytes,
        ):
            tasks: list[Task] = []
            for plan in plans:
                tasks += self._bind(plan, blocks, memories)
            yield tasks

    def _bind(
        self, plan: ChunkPlan, blocks: Sequence[Block], memories: Sequence[memoryview]
    ) -> list[Task]:
        """Binds a plan to memory: gives its tasks.

        All work that serves several chunks is done here, not in the lanes: while a lane runs
        Python code the other lanes wait for the interpreter's lock.
        """
        first_chunk, buffer_plans, task_plans = plan
        chunks = slice(first_chunk, first_chunk + len(buffer_plans[0].units))
        blocks, memories = blocks[chunks], memories[chunks]
        step = step_of(blocks)
        copiers = [self._copier_of(buffers, blocks, memories, step) for buffers in buffer_plans]
        return [
            Task(first_chunk + number, number, block, memories[number], copiers, task)
            for number, block in enumerate(blocks)
            for task in task_plans
        ]

    def _copier_of(
        self,
        plan: BufferPlan,
        blocks: Sequence[Block],
        memories: Sequence[memoryview],
        step: int | None,
    ) -> Copier:
        numbers, device = plan.buffer_set.numbers, self._pool.device
        if all(self._in_memory[number] for number in numbers):
            views = self._views_of(plan, numpy_element(plan))
            return HostCopier(views, plan.units, memories, step, plan.block_offset)
        bits = reduce(or_, (self._bits[number] for number in numbers))
        views = self._views_of(plan, torch_element(plan, bits, blocks, device.elements))
        units = device.upload(torch.from_numpy(plan.units))
        return DeviceCopier(views, units, blocks, plan.block_offset)

    def _views_of(self, plan: BufferPlan, element: str | torch.dtype) -> Any:
        """The buffers of a plan as units of `element`, mostly from the cache."""
        numbers = plan.buffer_set.numbers
        key = (numbers, plan.skip_bytes, plan.unit_bytes, element)
        if key not in self._views:
            if sum(map(len, self._views.values())) + len(numbers) > _MOST_VIEWS:
                self._views.clear()
            views = [
                view_of(self._pool.buffers[number], plan.skip_bytes, plan.unit_bytes, element)
                for number in numbers
            ]
            self._views[key] = views if isinstance(element, torch.dtype) else joined(views)
        return self._views[key]

    def _submit(
        self,
        phases: Callable[[], _Phases],
        rows: Sequence[Ids],
        blocks: Sequence[Block],
        chunk_bytes: int,
        at_once: bool,
    ) -> Job[list[list[Span]]]:
        # The sections are made in the calling thread, so that the queue's thread only reads them.
        count = self.chunk_count(rows, chunk_bytes)
        assert count == len(blocks), f"{len(blocks)} blocks for {count} chunks: one a chunk"
        # Staging isn't as large as a full chunk: a snapshot from outside may state any chunk size.
        largest = max(
            section.largest_chunk_bytes(rows[section.group].size)
            for section in self.sections(chunk_bytes)
        )
        return self._pool.device.submit(phases, staging_bytes=largest, at_once=at_once)

    def _bound_sections(self, chunk_bytes: int) -> list[tuple[Section, list[BufferSet]]]:
        if chunk_bytes not in self._sections:
            if len(self._sections) >= _MOST_CHUNK_SIZES:
                self._sections.clear()
            self._sections[chunk_bytes] = [
                (section, buffer_sets(section, self._pool.buffer_rows))
                for section in sections_of(self._pool.geometry, chunk_bytes)
            ]
        return self._sections[chunk_bytes]


@final
class _WritingJob:
    """A job that raises SlotsLost for errors once `writing` isn't empty."""

    def __init__(self, job: Job[list[list[Span]]], writing: Sequence[bool]) -> None:
        self._job = job
        self._writing = writing

    def done(self) -> bool:
        """See Job."""
        return self._job.done()

    def wait(self) -> list[list[Span]]:
        """See Job."""
        try:
            return self._job.wait()
        except Exception as error:
            # If the job isn't done, a signal handler raised the error.
            if not self._writing or not self._job.done():
                raise
            raise SlotsLost(
                f"a restore failed while it wrote ({first_line(error)}): its slots hold neither "
                "the old bytes nor the new; release them, and restore the snapshot elsewhere or "
                "recompute this request"
            ) from error


def _checks(spans: Sequence[Span], memories: Sequence[memoryview]) -> list[Step[list[Span]]]:
    parts = (spans[first : first + _STEP_SPANS] for first in range(0, len(spans), _STEP_SPANS))
    return [Step(partial(_check, part, memories)) for part in parts]


def _check(spans: Sequence[Span], memories: Sequence[memoryview]) -> list[Span]:
    for span in spans:
        span.check(memories[span.chunk])
    return []


def _nothing() -> list[Span]:
    return []
