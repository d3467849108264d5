"""CPUCopy, the result of `get_cpu_copy`: a snapshot that reads as lists of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch

from kvtide.errors import LayoutError, SnapshotMiss
from kvtide.form import Section, sections_of
from kvtide.layout import Geometry, Ids
from kvtide.seal import Span
from kvtide.snapshot import Snapshot

TILE_COLUMNS = 16


@final
@dataclass(frozen=True, slots=True)
class CopyPart:
    """A tensor of a layer: its place in a snapshot, and the form that engines expect.

    An empty plane isn't in the snapshot: its `buffer` is None. If `tiles` is 0, a row is a token.
    Otherwise a row is a page of `page_size` tokens, [tile, token, 16].
    """

    name: str
    buffer: int | None
    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tiles: int = 0
    page_size: int = 1

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts rows (uint8 [row, row_bytes]) to tokens [row * page_size, *shape]."""
        typed = rows.view(self.dtype)
        if self.tiles:
            paged = typed.view(-1, self.tiles, self.page_size, TILE_COLUMNS)
            typed = paged.transpose(1, 2)
        return typed.reshape(-1, *self.shape)

    def to_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Converts tokens of whole pages, [token, *shape], to rows: tiled, if there are tiles."""
        if not self.tiles:
            return tokens
        paged = tokens.view(-1, self.page_size, self.tiles, TILE_COLUMNS)
        return paged.transpose(1, 2).contiguous()


Parts = Sequence[Sequence[CopyPart]]
"""The tensors of each layer of the stage, in order."""


@final
class CPUCopy:
    """`copy[layer][chunk]` is a list of host tensors [token, *shape]; layers are the stage's.

    The bytes are in a snapshot, whose host memory counts against the pool's limit until `release`,
    or until the copy and its layers are forgotten. Each access makes new tensors: they stay valid
    after the release, and writing to them changes no snapshot. Each chunk of the snapshot is
    checked against the seal before it is read for the first time.
    """

    def __init__(
        self, snapshot: Snapshot, geometry: Geometry, parts: Parts, chunk_size: int
    ) -> None:
        """Called by the pools. `geometry` is the snapshot's; `chunk_size` is in tokens."""
        self.snapshot = snapshot
        self.chunk_size = chunk_size
        self._parts = parts
        self._reader = _Reader(snapshot, geometry)
        # The reader decides when to release, not this object, since a layer taken out of this
        # object still reads. __del__ won't do: in a cycle the order of finalisers is undefined.
        self._release = weakref.finalize(self._reader, snapshot.lease.release)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, layer: int) -> LayerCopy:
        return LayerCopy(self._reader, self._parts[layer], self.chunk_size)

    def __iter__(self) -> Iterator[LayerCopy]:
        return (self[layer] for layer in range(len(self)))

    @property
    def token_count(self) -> int:
        """How many tokens the copy has; as many slots are needed to load it."""
        return self.snapshot.token_count

    def release(self) -> None:
        """Gives the host memory back. Reading or loading the copy raises SnapshotMiss then."""
        self._release()


@final
class LayerCopy:
    """A layer of a CPUCopy: `layer[chunk]` is a list of tensors, in the pool's order."""

    def __init__(self, reader: _Reader, parts: Sequence[CopyPart], chunk_size: int) -> None:
        self._reader = reader
        self._parts = parts
        self._chunk_size = chunk_size

    def __len__(self) -> int:
        return -(-self._reader.token_count // self._chunk_size)

    def __getitem__(self, chunk: int) -> list[torch.Tensor]:
        first = range(len(self))[chunk] * self._chunk_size
        stop = min(first + self._chunk_size, self._reader.token_count)
        return [self._reader.tokens(part, first, stop) for part in self._parts]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return (self[chunk] for chunk in range(len(self)))


@final
class _Reader:
    """Reads single layers of planes from a snapshot's blocks."""

    def __init__(self, snapshot: Snapshot, geometry: Geometry) -> None:
        seal = snapshot.seal
        self.token_count = snapshot.token_count
        self._lease = snapshot.lease
        self._firsts = [seal.tokens_of(group) for group in range(len(seal.tokens))]
        self._spans: list[list[Span]] = [[] for _ in seal.used_bytes]
        for span in seal.spans:
            self._spans[span.chunk].append(span)
        self._checked: set[int] = set()
        self._places: dict[int, tuple[Section, int, int, int]] = {}
        # A buffer of these pools is a layer of a plane.
        first_buffers = [0, *accumulate(plane.layer_count for plane in geometry.planes)]
        chunk = 0
        for section in sections_of(geometry, seal.chunk_bytes):
            before = 0
            for plane, layers, width in zip(
                section.planes, section.layers, section.widths, strict=True
            ):
                for layer in layers:
                    place = (section, chunk, before, width)
                    self._places[first_buffers[plane] + layer] = place
                    before += width
            chunk += section.chunk_count(self._firsts[section.group].size)

    def tokens(self, part: CopyPart, first: int, stop: int) -> torch.Tensor:
        """The tokens from `first` to `stop` - 1 of a part, [token, *shape]."""
        if self._lease.released:
            raise SnapshotMiss(f"the CPU copy of {self.token_count} tokens was released already")
        if part.buffer is None:
            return torch.empty((stop - first, *part.shape), dtype=part.dtype)
        numbers = np.arange(first, stop)
        firsts: Ids = self._firsts[part.group]
        rows = np.searchsorted(firsts, numbers, side="right") - 1
        tokens = part.to_tokens(self._rows(part, int(rows[0]), int(rows[-1]) + 1))
        if not part.tiles:
            return tokens
        # The last page of a request may have fewer tokens than it could hold.
        places = (rows - rows[0]) * part.page_size + numbers - firsts[rows]
        return tokens[torch.from_numpy(places)]

    def _rows(self, part: CopyPart, first: int, stop: int) -> torch.Tensor:
        """A copy of some rows of a part, uint8 [row, row_bytes]."""
        assert part.buffer is not None
        section, chunk, before, width = self._places[part.buffer]
        row_count = self._firsts[section.group].size * section.row_parts
        start, end, size = first * section.row_parts, stop * section.row_parts, section.chunk_rows
        found = []
        for number in range(start // size, -(-end // size)):
            held = min(size, row_count - number * size)
            self._check(chunk + number)
            block = self._lease.blocks[chunk + number]
            low, high = max(0, start - number * size), min(held, end - number * size)
            offset = block.offset + held * before
            found.append(block.slab[offset + low * width : offset + high * width])
        return torch.cat(found).view(stop - first, -1)

    def _check(self, chunk: int) -> None:
        if chunk in self._checked:
            return
        memory = self._lease.blocks[chunk].bytes_view(self._spans[chunk][-1].stop)
        for span in self._spans[chunk]:
            span.check(memory)
        self._checked.add(chunk)


def planes_of_lists(
    parts: Parts, lists: Any, token_count: int, page_size: int
) -> dict[str, list[torch.Tensor]]:
    """Copies nested lists [layer][chunk] of tensors [token, *shape] to planes of whole pages.

    Chunks may have any length. Raises LayoutError, which names layer and chunk, for a wrong number
    of layers, tensors or tokens, and for a tensor of another shape, dtype or device than the CPU.
    """
    if not isinstance(lists, list | tuple) or len(lists) != len(parts):
        found = len(lists) if isinstance(lists, list | tuple) else type(lists).__name__
        raise LayoutError(f"CPU copy: {found} layers, the pool has {len(parts)}")
    padded = max(1, -(-token_count // page_size)) * page_size
    planes: dict[str, list[torch.Tensor]] = {}
    for layer, (expected, chunks) in enumerate(zip(parts, lists, strict=True)):
        checked = _checked_chunks(expected, chunks, token_count, f"CPU copy, layer {layer}")
        for number, part in enumerate(expected):
            if part.buffer is None:
                continue
            whole = torch.zeros((padded, *part.shape), dtype=part.dtype)
            first = 0
            for chunk in checked:
                tokens = chunk[number]
                whole[first : first + len(tokens)].copy_(tokens)
                first += len(tokens)
            planes.setdefault(part.name, []).append(part.to_rows(whole))
    return planes


def _checked_chunks(
    parts: Sequence[CopyPart], chunks: Any, token_count: int, where: str
) -> Sequence[Sequence[torch.Tensor]]:
    if not isinstance(chunks, list | tuple):
        raise LayoutError(f"{where}: {type(chunks).__name__} instead of a list of chunks")
    total = 0
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, list | tuple) or len(chunk) != len(parts):
            names = [part.name for part in parts]
            raise LayoutError(f"{where}, chunk {number}: it isn't a list of {names}")
        lengths = set[int]()
        for part, tensor in zip(parts, chunk, strict=True):
            lengths.add(_checked_length(part, tensor, f"{where}, chunk {number}, {part.name!r}"))
        if len(lengths) > 1:
            raise LayoutError(f"{where}, chunk {number}: tensors of {sorted(lengths)} tokens")
        total += lengths.pop()
    if total != token_count:
        raise LayoutError(f"{where}: {total} tokens for {token_count} slots")
    return chunks


def _checked_length(part: CopyPart, tensor: Any, where: str) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{where}: {type(tensor).__name__} instead of a tensor")
    found = (tensor.dtype, tuple(tensor.shape[1:]), tensor.device.type, tensor.dim())
    wanted = (part.dtype, part.shape, "cpu", len(part.shape) + 1)
    if found != wanted:
        raise LayoutError(
            f"{where}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}, not {part.dtype} "
            f"[token, {', '.join(map(str, part.shape))}] on the CPU"
        )
    return len(tensor)
