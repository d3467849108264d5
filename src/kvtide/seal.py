"""Seal: describes a snapshot's bytes and has their checksums. Pure.

The bytes can be checked anywhere, without a device, a pool or torch. A seal can be written as JSON
and read again, so a snapshot can leave the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, final

import numpy as np
import xxhash

from kvtide.errors import SnapshotDamaged, SnapshotMiss
from kvtide.integers import LARGEST, integer_of, shown
from kvtide.layout import FORM_VERSION, Ids, canonical_json, differences, fingerprint_of

Ranges = tuple[range, ...]
"""Token numbers, ascending."""


_HEX = "0123456789abcdef"
_MOST_DEPTH = 16
_LEAVES = (str, int, float, type(None))


class Span(NamedTuple):
    """Some bytes of a chunk, `first` to `stop` - 1, and their XXH3 64 checksum."""

    chunk: int
    first: int
    stop: int
    checksum: int

    def check(self, chunk: memoryview | bytes) -> None:
        """Raises SnapshotDamaged if the bytes of `chunk` in this span differ from the checksum."""
        part = chunk[self.first : self.stop]
        found = xxhash.xxh3_64_intdigest(part)
        if len(part) != self.stop - self.first or found != self.checksum:
            raise SnapshotDamaged(
                f"chunk {self.chunk}: {len(part)} bytes from byte {self.first} on with checksum "
                f"{found:016x}, sealed as {self.stop - self.first} with {self.checksum:016x}; "
                "use nothing of the snapshot, and recompute this request"
            )


@final
@dataclass(frozen=True)
class Seal:
    """Describes a snapshot: which target fits it, and the checksums of its bytes.

    `geometry` is the canonical JSON of the source's geometry (`Geometry.canonical`). `key` is a
    text of the caller's that tells snapshots apart (model, revision, adapter, request). `tokens`
    says for each group of planes which tokens of the request have rows, as ranges: all tokens, the
    tokens of a window, or those of a rank. For a row of several tokens `tokens` has its first token
    and `lasts` its last. `spans` cover every used byte of every chunk, in order.
    """

    geometry: str
    key: str
    token_count: int
    tokens: tuple[Ranges, ...]
    lasts: tuple[Ranges, ...]
    chunk_bytes: int
    spans: tuple[Span, ...]

    @cached_property
    def fingerprint(self) -> bytes:
        """The fingerprint of the geometry, 16 bytes."""
        return fingerprint_of(self.geometry)

    @cached_property
    def used_bytes(self) -> tuple[int, ...]:
        """How many bytes of each chunk are used."""
        return tuple({span.chunk: span.stop for span in self.spans}.values())

    def tokens_of(self, group: int) -> Ids:
        """The first token of each row in that group of planes, int64 [row]."""
        return _numbers_of(self.tokens[group])

    def lasts_of(self, group: int) -> Ids:
        """The last token of each row in that group of planes, int64 [row]."""
        return _numbers_of(self.lasts[group])

    def check_target(self, geometry: str, key: str, token_count: int) -> None:
        """Raises SnapshotMiss, which says what differs, if a target doesn't fit."""
        if geometry != self.geometry:
            lines = differences(json.loads(geometry), json.loads(self.geometry))
            raise SnapshotMiss(
                f"a snapshot of another geometry (here: the target, there: the snapshot): "
                f"{'; '.join(lines)}; recompute this request"
            )
        for name, sealed, wanted in (
            ("key", self.key, key),
            ("token count", self.token_count, token_count),
        ):
            if sealed != wanted:
                raise SnapshotMiss(f"snapshot's {name} is {sealed!r}, the target's {wanted!r}")

    def check_coverage(self, chunk_sizes: Iterable[int]) -> None:
        """Raises SnapshotMiss unless the spans cover exactly `chunk_sizes` bytes of the chunks.

        The sizes are read one after another, since a hostile seal may state chunks so small that a
        list of all the target's chunks wouldn't fit into memory.
        """
        for chunk, sizes in enumerate(zip_longest(self.used_bytes, chunk_sizes, fillvalue=0)):
            if sizes[0] != sizes[1]:
                raise SnapshotMiss(
                    f"snapshot is sealed with {sizes[0]} bytes in chunk {chunk}, the target has "
                    f"{sizes[1]} there; recompute this request"
                )

    def check_bytes(self, chunks: Sequence[memoryview | bytes]) -> None:
        """Raises SnapshotDamaged if a byte of `chunks` differs from the checksums.

        A chunk may be longer than its used bytes; further bytes are ignored.
        """
        if len(chunks) != len(self.used_bytes):
            raise SnapshotDamaged(
                f"snapshot has {len(chunks)} chunks, sealed as {len(self.used_bytes)}; "
                "recompute this request"
            )
        for span in self.spans:
            span.check(chunks[span.chunk])

    def to_json(self) -> str:
        """The seal as canonical JSON, with a checksum of the JSON."""
        form = self._to_dict()
        return canonical_json(form | {"checksum": _checksum_of(form)})

    def _to_dict(self) -> dict[str, object]:
        return {
            "form": FORM_VERSION,
            "geometry": json.loads(self.geometry),
            "key": self.key,
            "token_count": self.token_count,
            "tokens": [_to_lists(ranges) for ranges in self.tokens],
            "lasts": [_to_lists(ranges) for ranges in self.lasts],
            "chunk_bytes": self.chunk_bytes,
            "spans": [[*span[:3], f"{span.checksum:016x}"] for span in self.spans],
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Seal:
        """Reads a seal from JSON, which is untrusted.

        Raises SnapshotMiss for another version of the form, which another kvtide reads, and
        SnapshotDamaged for anything that isn't a complete seal.
        """
        try:
            form = json.loads(text)
            if not isinstance(form, dict):
                raise _damaged(f"it is {shown(form)}, not an object")
            checksum = form.pop("checksum", None)
            found = _checksum_of(form)
        except (ValueError, RecursionError) as error:  # not JSON, or NaN or Infinity
            raise _damaged(f"it isn't JSON ({error})") from error
        if integer_of(form.get("form")) != FORM_VERSION:
            raise SnapshotMiss(
                f"snapshot has form version {shown(form.get('form'))}, this kvtide reads "
                f"{FORM_VERSION}; read it with the kvtide that wrote it, or recompute this request"
            )
        if checksum != found:
            raise _damaged(f"its checksum is {found}, sealed as {shown(checksum)}")
        return _from_dict(form)


def ranges_of(tokens: Ids | None) -> Ranges:
    """Ascending token numbers, int64 [row], as ranges; none for None."""
    if tokens is None or not tokens.size:
        return ()
    if tokens[-1] - tokens[0] == tokens.size - 1:
        return (range(int(tokens[0]), int(tokens[-1]) + 1),)
    steps = np.diff(tokens)
    ranges: list[range] = []
    first = 0
    while first < tokens.size:
        step = int(steps[first]) if first < steps.size else 1
        same = np.flatnonzero(steps[first:] != step)
        stop = first + int(same[0]) + 1 if same.size else tokens.size
        ranges.append(range(int(tokens[first]), int(tokens[stop - 1]) + 1, step))
        first = stop
    return tuple(ranges)


def _numbers_of(ranges: Ranges) -> Ids:
    parts = [np.arange(part.start, part.stop, part.step) for part in ranges]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _to_lists(ranges: Ranges) -> list[list[int]]:
    return [[part.start, part.stop, part.step] for part in ranges]


def _checksum_of(form: Mapping[str, Any]) -> str:
    return f"{xxhash.xxh3_64_intdigest(canonical_json(form).encode()):016x}"


# ---- reading untrusted JSON --------------------------------------------------------------


def _from_dict(form: Mapping[str, Any]) -> Seal:
    """A seal from JSON values with a right checksum, which an attacker can make, too."""
    fields = {"form", "geometry", "key", "token_count", "tokens", "lasts", "chunk_bytes", "spans"}
    if set(form) != fields:
        raise _damaged(f"its fields are {sorted(form)}, not {sorted(fields)}")
    if not isinstance(form["key"], str) or not isinstance(form["geometry"], dict):
        raise _damaged("its key isn't a text, or its geometry isn't an object")
    _check_depth(form["geometry"])
    token_count = _integer(form["token_count"], LARGEST)
    most = max(1, token_count)  # a row that isn't per token counts as token 0
    seal = Seal(
        canonical_json(form["geometry"]),
        form["key"],
        token_count,
        tuple(_to_ranges(lists, most) for lists in _list(form["tokens"])),
        tuple(_to_ranges(lists, most) for lists in _list(form["lasts"])),
        _integer(form["chunk_bytes"], LARGEST, least=1),
        tuple(_to_span(fields) for fields in _list(form["spans"])),
    )
    _check_groups(seal, _list(form["geometry"].get("groups")))
    _check_order(seal)
    return seal


def _check_depth(geometry: object) -> None:
    """Raises SnapshotDamaged for JSON that is nested deeper than any geometry.

    Python can't read such JSON again when its stack is nearly full.
    """
    values: list[Any] = [geometry]
    for _ in range(_MOST_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in values)
        values = [value for part in inner if not isinstance(part, _LEAVES) for value in part]
    if values:
        raise _damaged(f"its geometry nests {_MOST_DEPTH} levels deep")


def _check_groups(seal: Seal, groups: Sequence[object]) -> None:
    """Raises SnapshotDamaged unless each group of planes has rows, all or none with last tokens."""
    if not len(seal.tokens) == len(seal.lasts) == len(groups):
        raise _damaged(
            f"it has the tokens of {len(seal.tokens)} groups of planes and the last tokens of "
            f"{len(seal.lasts)}, its geometry has {len(groups)} groups"
        )
    for number, (firsts, lasts) in enumerate(zip(seal.tokens, seal.lasts, strict=True)):
        counts = [sum(map(len, ranges)) for ranges in (firsts, lasts)]
        if lasts and counts[0] != counts[1]:
            raise _damaged(f"group {number} has {counts[0]} rows and {counts[1]} last tokens")


def _check_order(seal: Seal) -> None:
    """Raises SnapshotDamaged unless the spans cover each chunk from byte 0 on, without a gap."""
    chunk, stop = 0, 0
    for span in seal.spans:
        if span.chunk == chunk + 1 and stop:
            chunk, stop = span.chunk, 0
        if (span.chunk, span.first) != (chunk, stop) or not stop < span.stop <= seal.chunk_bytes:
            raise _damaged(f"span {tuple(span)} doesn't follow byte {stop} of chunk {chunk}")
        stop = span.stop


def _to_ranges(lists: Any, token_count: int) -> Ranges:
    ranges: list[range] = []
    for fields in _list(lists):
        if len(_list(fields)) != 3:
            raise _damaged(f"{shown(fields)} isn't a range of tokens")
        start, stop, step = (_integer(field, token_count) for field in fields)
        if not (ranges[-1][-1] < start if ranges else True) or not start < stop or step < 1:
            raise _damaged(f"tokens {start} to {stop} in steps of {step} aren't ascending")
        ranges.append(range(start, stop, step))
    return tuple(ranges)


def _to_span(fields: Any) -> Span:
    if len(_list(fields)) != 4:
        raise _damaged(f"{shown(fields)} isn't a span")
    *numbers, checksum = fields
    if not isinstance(checksum, str) or len(checksum) != 16 or set(checksum) - set(_HEX):
        raise _damaged(f"{shown(checksum)} isn't a checksum of 16 hexadecimal digits")
    chunk, first, stop = (_integer(number, LARGEST) for number in numbers)
    return Span(chunk, first, stop, int(checksum, 16))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _damaged(f"{shown(value)} isn't a list")
    return value


def _integer(value: Any, largest: int, *, least: int = 0) -> int:
    number = integer_of(value)
    if number is None or not least <= number <= largest:
        raise _damaged(f"{shown(value)} isn't an integer in {least} … {largest}")
    return number


def _damaged(what: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"a snapshot's seal is damaged: {what}; recompute this request")
