"""Reads a snapshot's file and checks every byte of it, whoever wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import xxhash

from kvtide.errors import SnapshotDamaged
from kvtide.seal import Seal, Span
from kvtide.tier.file_form import (
    ALIGNMENT,
    FileForm,
    damaged,
    header_bytes_of,
    padded,
    read_header,
)
from kvtide.tier.file_io import aligned_memory, read_all, through_cache_unless_aligned
from kvtide.tier.names import name_of

if TYPE_CHECKING:
    from kvtide.device.threads import QueuedJob, Threads

_PIECE_BYTES = 4 << 20
_GROUP_BYTES = 16 << 20


def read_seal(file: int, key: str | None = None) -> tuple[str, Seal, FileForm]:
    """The key, seal and form of an open file, checked; the file must be of `key` unless None.

    Raises SnapshotDamaged, SnapshotMiss for a seal of another version, OSError.
    """
    file_bytes = os.fstat(file).st_size
    if file_bytes % ALIGNMENT or not file_bytes:
        raise damaged(f"its length is {file_bytes} bytes, which isn't a multiple of {ALIGNMENT}")
    page = aligned_memory(ALIGNMENT)
    _read(file, 0, [page])
    header_bytes = header_bytes_of(page, file_bytes)
    header = page
    if header_bytes > ALIGNMENT:
        header = aligned_memory(padded(header_bytes))
        _read(file, 0, [header])
    found, seal, form = read_header(bytes(header), file_bytes)
    if key is not None and found != key:
        raise damaged(f"it is of the key {found!r}, under the name of {key!r}")
    return found, seal, form


def read_chunks(file: int, form: FileForm, seal: Seal, chunks: Sequence[memoryview]) -> None:
    """Reads the chunks into memory, and checks them and what is between them.

    `chunks` are writable, one for each chunk of its used bytes. Raises SnapshotDamaged, OSError.
    """
    if len(chunks) != len(seal.used_bytes):
        raise damaged(f"{len(chunks)} chunks were asked for, it has {len(seal.used_bytes)}")
    place = 0
    checking: QueuedJob[None] | None = None
    try:
        for first, stop in _groups(chunks):
            _read_group(file, form.offsets[first], chunks[first:stop])
            if checking is not None:
                checking.wait()
            begin = place
            while place < len(seal.spans) and seal.spans[place].chunk < stop:
                place += 1
            check = partial(_check_spans, seal.spans[begin:place], chunks)
            if stop == len(chunks):
                check()
            else:  # meanwhile this thread reads on
                checking = _checker().start(check)
    finally:
        if checking is not None:
            checking.settle()


@cache
def _checker() -> Threads:
    """One thread for all files: it checks many times as fast as a disk reads."""
    from kvtide.device.threads import Threads  # with torch, which `kvtide inspect` doesn't need

    return Threads(1, "kvtide-check")


def _check_spans(spans: Sequence[Span], chunks: Sequence[memoryview]) -> None:
    for span in spans:
        span.check(chunks[span.chunk])


def _groups(chunks: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
    """Numbers of chunks that are read together: the first, and the one behind the last."""
    first, size_bytes = 0, 0
    for number, chunk in enumerate(chunks):
        if number > first and size_bytes + chunk.nbytes > _GROUP_BYTES:
            yield first, number
            first, size_bytes = number, 0
        size_bytes += chunk.nbytes
    if chunks:
        yield first, len(chunks)


def _read_group(file: int, place: int, chunks: Sequence[memoryview]) -> None:
    """Reads chunks that follow each other from byte `place` on, and checks what is between them."""
    parts: list[memoryview] = []
    ends: list[tuple[memoryview, memoryview]] = []
    for chunk in chunks:
        whole = chunk.nbytes // ALIGNMENT * ALIGNMENT
        parts += [chunk[:whole]] if whole else []
        if whole < chunk.nbytes:
            ends.append((chunk[whole:], aligned_memory(ALIGNMENT)))
            parts.append(ends[-1][1])
    with through_cache_unless_aligned(file, parts):
        _read(file, place, parts)
    for end, page in ends:
        end[:] = page[: end.nbytes]
        _check_gap(page[end.nbytes :])


def check_file(file: int, name: str) -> tuple[str, Seal]:
    """Checks every byte of an open file in little memory; gives its key and its seal.

    `name` is the file's (`name_of` its key): it alone tells whether the key is right. Raises
    SnapshotDamaged, SnapshotMiss for a seal of another version, OSError.
    """
    key, seal, form = read_seal(file)
    if name_of(key) != name:
        raise damaged(f"it is of the key {key!r}, which has another name")
    memory = aligned_memory(_PIECE_BYTES)
    for span in seal.spans:
        place = form.offsets[span.chunk]
        checksum = xxhash.xxh3_64()
        for first in range(span.first, span.stop, _PIECE_BYTES):
            piece = memory[: min(_PIECE_BYTES, span.stop - first)]
            _read(file, place + first, [piece])
            checksum.update(piece)
        if checksum.intdigest() != span.checksum:
            raise SnapshotDamaged(
                f"chunk {span.chunk}: the bytes from {span.first} to {span.stop} have checksum "
                f"{checksum.intdigest():016x}, sealed with {span.checksum:016x}"
            )
    for offset, used_bytes in zip(form.offsets, seal.used_bytes, strict=True):
        gap = memory[: padded(used_bytes) - used_bytes]
        _read(file, offset + used_bytes, [gap])
        _check_gap(gap)
    return key, seal


def _check_gap(gap: memoryview) -> None:
    if any(gap):
        raise damaged("there are bytes between its chunks")


def _read(file: int, place: int, parts: Sequence[memoryview]) -> None:
    try:
        read_all(file, place, parts)
    except EOFError as error:
        raise damaged(str(error)) from error
