"""Stage 3: units move between buffers and blocks, and spans are hashed while they are in cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvtide.device import Block
from kvtide.layout import Ids
from kvtide.seal import Span
from kvtide.transfer.plan import TaskPlan


@final
class HostCopier:
    """Moves the units of a buffer plan in host memory, by numpy.

    A call of numpy takes a microsecond, a call of torch eight, and a lane blocks the other lanes
    while it is in the interpreter. numpy also moves a unit as a whole in both directions; torch's
    index_copy_ moves element by element.
    """

    def __init__(
        self,
        buffers: Sequence[NDArray[Any]] | NDArray[Any],
        units: Ids,
        memories: Sequence[memoryview],
        step: int | None,
        block_offset: int,
    ) -> None:
        """`buffers` are views as units, [unit] or [unit, byte], or one view of them all. `units`
        has the units of each chunk, int64 [chunk, unit]; in its memory they begin at byte
        `block_offset`."""
        self._buffers = buffers
        self._units = units
        self._block_offset = block_offset
        self._shape = (len(buffers), units.shape[1], *buffers[0].shape[1:])
        self._places: Sequence[NDArray[Any]] | NDArray[Any]
        if step is None:
            self._places = [self._place(memory) for memory in memories]
        else:  # a single call of numpy gives the views of all blocks
            strides = (step, *self._place(memories[0]).strides)
            shape, dtype = (len(memories), *self._shape), buffers[0].dtype
            self._places = np.ndarray(shape, dtype, memories[0], block_offset, strides)
        self._lines = self._lines_of(buffers, units)

    def _lines_of(
        self, buffers: Sequence[NDArray[Any]] | NDArray[Any], units: Ids
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """For each chunk its place, and its only unit in all buffers, as views [buffer, …].

        So a block of an engine moves by a call for many layers. Without such views it is empty.
        """
        if units.shape[1] != 1 or not isinstance(buffers, np.ndarray):
            return []
        pairs = zip(self._places, units[:, 0].tolist(), strict=True)
        return [(place[:, 0], buffers[:, unit]) for place, unit in pairs]

    def _place(self, memory: memoryview) -> NDArray[Any]:
        """The place of the units in a block or in staging, as a view [buffer, unit, …]."""
        return np.ndarray(self._shape, self._buffers[0].dtype, memory, self._block_offset)

    def gather(
        self, number: int, buffers: range, only: slice | None, staging: torch.Tensor | None
    ) -> None:
        """Copies units of chunk `number` to its block, or to `staging` if that isn't None.

        It copies all units of these buffers, or the units in `only`.
        """
        if self._lines and staging is None:
            place, line = self._lines[number]
            place[buffers.start : buffers.stop] = line[buffers.start : buffers.stop]
            return
        units, place = self._ends(number, only, staging)
        for buffer in buffers:
            # The units are valid, so "clip" clips none. For "raise" numpy would copy twice.
            self._buffers[buffer].take(units, 0, place[buffer], "clip")

    def scatter(
        self, number: int, buffers: range, only: slice | None, staging: torch.Tensor | None
    ) -> None:
        """Copies the same units back."""
        if self._lines and staging is None:
            place, line = self._lines[number]
            line[buffers.start : buffers.stop] = place[buffers.start : buffers.stop]
            return
        units, place = self._ends(number, only, staging)
        for buffer in buffers:
            self._buffers[buffer][units] = place[buffer]

    def _ends(
        self, number: int, only: slice | None, staging: torch.Tensor | None
    ) -> tuple[Ids, NDArray[Any]]:
        units = self._units[number]
        place = self._places[number] if staging is None else self._place(staging.numpy().data)
        return (units, place) if only is None else (units[only], place[:, only])


@final
class DeviceCopier:
    """Moves the units of a buffer plan by torch: on any device, and rows with gaps on the host.

    It works in inference mode: tensors that an engine made in that mode can't be written outside.
    """

    def __init__(
        self,
        buffers: list[torch.Tensor],
        units: torch.Tensor,
        blocks: Sequence[Block],
        block_offset: int,
    ) -> None:
        """`buffers` are views as units, [unit, element]. `units` has the units of each chunk, int64
        [chunk, unit], uploaded; in the chunk's block they begin at byte `block_offset`."""
        self._buffers = buffers
        self._units = units.unbind()
        self._blocks = blocks
        self._block_offset = block_offset
        self._shape = (units.shape[1], buffers[0].shape[1])
        self._place_bytes = units.shape[1] * buffers[0].shape[1] * buffers[0].element_size()

    @torch.inference_mode()
    def gather(
        self, number: int, buffers: range, only: slice | None, staging: torch.Tensor | None
    ) -> None:
        """See HostCopier."""
        for buffer in buffers:
            units, place = self._ends(number, buffer, only, staging)
            torch.index_select(self._buffers[buffer], 0, units, out=place)

    @torch.inference_mode()
    def scatter(
        self, number: int, buffers: range, only: slice | None, staging: torch.Tensor | None
    ) -> None:
        """See HostCopier."""
        for buffer in buffers:
            units, place = self._ends(number, buffer, only, staging)
            self._buffers[buffer].index_copy_(0, units, place)

    def _ends(
        self, number: int, buffer: int, only: slice | None, staging: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        units, first = self._units[number], self._block_offset + buffer * self._place_bytes
        memory = staging
        if memory is None:
            block = self._blocks[number]
            memory, first = block.slab, block.offset + first
        place = memory[first : first + self._place_bytes].view(self._buffers[0].dtype)
        place = place.view(self._shape)
        return (units, place) if only is None else (units[only], place[only])


Copier = HostCopier | DeviceCopier


@final
class Task:
    """The work of a lane at a time: some whole spans of a chunk, most often all of them."""

    def __init__(
        self,
        chunk: int,
        number: int,
        block: Block,
        memory: memoryview,
        copiers: Sequence[Copier],
        plan: TaskPlan,
    ) -> None:
        """`number` counts the chunks that `copiers` know. `memory` is the block's memory."""
        self._chunk = chunk
        self._number = number
        self._block = block
        self._memory = memory
        self._copiers = copiers
        self._spans, self._calls = plan
        self._first = self._spans[0][0]
        self._stop = self._spans[-1][1]
        self._sealed: list[Span] = []
        self._unchecked: deque[Span] = deque()

    def gather(self, staging: torch.Tensor | None) -> None:
        """Copies units to the block, through `staging` if that isn't None."""
        for plan, buffers, only, _ in self._calls:
            self._copiers[plan].gather(self._number, buffers, only, staging)
        if staging is not None:
            target = self._block.tensor(self._first, self._stop)
            target.copy_(staging[self._first : self._stop], non_blocking=True)

    def gather_hashing(self, staging: torch.Tensor | None) -> None:
        """Copies like `gather`. Without staging it also computes the checksums."""
        if staging is not None:
            self.gather(staging)
            return
        spans = iter(self._spans)
        first, stop = next(spans)
        for plan, buffers, only, copied in self._calls:
            self._copiers[plan].gather(self._number, buffers, only, None)
            while copied >= stop:
                self._sealed.append(self._hashed(first, stop))
                if stop == self._stop:
                    return
                first, stop = next(spans)

    def scatter(self, staging: torch.Tensor | None) -> None:
        """Copies the block to units, through `staging` if that isn't None."""
        if staging is not None:
            source = self._block.tensor(self._first, self._stop)
            staging[self._first : self._stop].copy_(source, non_blocking=True)
        for plan, buffers, only, _ in self._calls:
            self._copiers[plan].scatter(self._number, buffers, only, staging)

    def take_from(self, unchecked: Sequence[deque[Span]]) -> None:
        """Takes over to check the spans whose last bytes it copies, of those left of its chunk."""
        spans = unchecked[self._chunk]
        while spans and spans[0].stop <= self._stop:
            self._unchecked.append(spans.popleft())

    def scatter_checking(self, staging: torch.Tensor | None) -> None:
        """Copies like `scatter`. Without staging it also checks the spans, right after the copy."""
        if staging is not None:
            self.scatter(staging)
            return
        for plan, buffers, only, copied in self._calls:
            self._copiers[plan].scatter(self._number, buffers, only, None)
            while self._unchecked and self._unchecked[0].stop <= copied:
                self._unchecked.popleft().check(self._memory)

    def check(self) -> list[Span]:
        """Checks what is left of the spans that it took over. Raises SnapshotDamaged."""
        while self._unchecked:
            self._unchecked.popleft().check(self._memory)
        return []

    def seal(self) -> list[Span]:
        """The task's spans, with their checksums. Call it once their bytes are in the block."""
        return self._sealed or [self._hashed(first, stop) for first, stop in self._spans]

    def _hashed(self, first: int, stop: int) -> Span:
        # A single call for all bytes of a span: xxhash takes 1.7 times as long for parts of it.
        return Span(self._chunk, first, stop, xxhash.xxh3_64_intdigest(self._memory[first:stop]))
