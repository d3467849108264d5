"""The form of a snapshot's file: a safetensors file with the seal and the chunks. Pure.

    8 bytes    the length of the header, little-endian
    header     JSON: key and seal as texts in `__metadata__`, the place of each tensor; then spaces
    chunk.0    the first chunk, uint8 [used bytes]
    gap.0      zeros up to the next multiple of ALIGNMENT, if the chunk doesn't end there
    chunk.1    and so on

So any reader of safetensors opens it, and each chunk begins at a multiple of ALIGNMENT, as direct
I/O needs. Key and seal give the whole file but for the chunks' bytes: a reader makes the header
again and compares, so each byte of the file is checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import final

from kvtide.errors import SnapshotDamaged
from kvtide.integers import shown
from kvtide.layout import canonical_json
from kvtide.seal import Seal

ALIGNMENT = 4096
LARGEST_HEADER = 16 << 20
"""Bytes. A header is read into memory before anything of it is checked."""

_METADATA = "__metadata__"
_LENGTH_BYTES = 8


@final
@dataclass(frozen=True)
class FileForm:
    """Where the parts of a snapshot's file are, in bytes.

    `header` is the beginning of the file up to the first chunk; chunk i begins at `offsets[i]`.
    """

    header: bytes
    offsets: tuple[int, ...]
    size_bytes: int


def padded(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def file_form_of(key: str, seal: Seal) -> FileForm:
    """The form of the file of a snapshot with this seal, under this key."""
    tensors: dict[str, object] = {}
    first = 0
    firsts: list[int] = []
    for number, used_bytes in enumerate(seal.used_bytes):
        firsts.append(first)
        stop = first + used_bytes
        tensors[f"chunk.{number}"] = _tensor(first, stop)
        first = padded(stop)
        if first > stop:
            tensors[f"gap.{number}"] = _tensor(stop, first)
    metadata = {"format": "kvtide", "key": key, "seal": seal.to_json()}
    text = canonical_json({_METADATA: metadata, **tensors}).encode()
    data = padded(_LENGTH_BYTES + len(text))
    length = data - _LENGTH_BYTES
    header = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
    return FileForm(header, tuple(data + first for first in firsts), data + first)


def header_bytes_of(beginning: bytes | memoryview, file_bytes: int) -> int:
    """How many bytes of a file its header takes, by its first 8 bytes, which are untrusted.

    Raises SnapshotDamaged for a length that no header of a file of `file_bytes` has.
    """
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    size_bytes = _LENGTH_BYTES + length
    if len(beginning) < _LENGTH_BYTES or not length or size_bytes > min(file_bytes, LARGEST_HEADER):
        raise damaged(f"a header of {length} bytes in a file of {file_bytes}")
    return size_bytes


def read_header(header: bytes, file_bytes: int) -> tuple[str, Seal, FileForm]:
    """Key, seal and form of a file that begins with `header`, which is untrusted.

    Raises SnapshotDamaged for a header that kvtide wouldn't have written for a file of this length,
    SnapshotMiss for a seal of another version.
    """
    try:
        fields = json.loads(header[_LENGTH_BYTES:])
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header isn't JSON ({error})") from error
    metadata = fields.get(_METADATA) if isinstance(fields, dict) else None
    if not isinstance(metadata, dict):
        raise damaged(f"its header has no metadata: {shown(metadata)}")
    key, text = metadata.get("key"), metadata.get("seal")
    if not isinstance(key, str) or not isinstance(text, str):
        raise damaged(f"its header has no key or no seal: {shown(metadata)}")
    seal = Seal.from_json(text)
    form = file_form_of(key, seal)
    if form.header != header:
        raise damaged("its header isn't the one of its key and seal")
    if form.size_bytes != file_bytes:
        raise damaged(f"it has {file_bytes} bytes, its seal says {form.size_bytes}")
    return key, seal, form


def damaged(what: str) -> SnapshotDamaged:
    """The error for a file whose bytes aren't those that were written."""
    return SnapshotDamaged(f"a snapshot's file is damaged: {what}; recompute this request")


def _tensor(first: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - first], "data_offsets": [first, stop]}
