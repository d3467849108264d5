"""The kit's reference: finds the bytes that a request owns slowly, token by token.

It reads the declaration and uses none of kvtide's rules, plans or movers. The kit compares their
results with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from math import lcm, prod
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvtide.layout import (
    EveryNth,
    EveryToken,
    Geometry,
    Mapped,
    OfRequest,
    PlaneGeometry,
    Rule,
    Striped,
)

Bytes = NDArray[np.uint8]
Image = dict[tuple[str, int], Bytes]
"""All bytes of a pool, by plane and layer (counted from the stage's first): uint8 [row, byte].

The bytes of a row come first, then the gap before the next row, which nobody may touch.
"""
Maps = Mapping[str, NDArray[np.int64]]
TokenIds = dict[int, int]
"""{token: id}, for the tokens that have one, in their order."""


@final
@dataclass(frozen=True)
class Place:
    """The places of a request: its token slots in order, the request's row, and the maps."""

    slots: Sequence[int]
    request: int | None
    maps: Maps


def rows_of_plane(plane: PlaneGeometry, place: Place) -> dict[int, int]:
    """{token: row}, for the tokens that have a row or are the first of several that share it."""
    ids = {token: int(slot) for token, slot in enumerate(place.slots)}
    for rule in plane.rules:
        ids = ids_by(rule, ids, place)
    rows: dict[int, int] = {}
    seen: set[int] = set()
    for token, row in ids.items():
        if row not in seen:
            seen.add(row)
            rows[token] = row
    return rows


@singledispatch
def ids_by(rule: Rule, ids: TokenIds, place: Place) -> TokenIds:
    """The ids to which `rule` leads from `ids`, {token: id}. Several tokens may share an id.

    For a rule of your own, write a function with the decorator `@ids_by.register` beside the rule's
    test. It must not use the rule's `apply`.
    """
    raise NotImplementedError(
        f"the kit's reference doesn't know {rule!r}: say what is expected of it, in a function of "
        f"(rule: {type(rule).__name__}, ids, place) with the decorator @ids_by.register"
    )


@ids_by.register
def _(_rule: EveryToken, ids: TokenIds, _place: Place) -> TokenIds:
    return ids


@ids_by.register
def _(rule: EveryNth, ids: TokenIds, _place: Place) -> TokenIds:
    return {token: number // rule.count for token, number in ids.items()}


@ids_by.register
def _(rule: Mapped, ids: TokenIds, place: Place) -> TokenIds:
    held = place.maps[rule.name]
    found = {token: int(held[number]) for token, number in ids.items()}
    return {token: number for token, number in found.items() if number > rule.hole}


@ids_by.register
def _(rule: Striped, ids: TokenIds, _place: Place) -> TokenIds:
    found: TokenIds = {}
    for token, number in ids.items():
        turn, within = divmod(number, rule.run)
        if turn % rule.world == rule.rank:
            found[token] = turn // rule.world * rule.run + within
    return found


@ids_by.register
def _(_rule: OfRequest, _ids: TokenIds, place: Place) -> TokenIds:
    assert place.request is not None, "a plane of requests needs to know whose"
    return {0: place.request}


@singledispatch
def ids_together(rule: Rule) -> int:
    """How many consecutive ids, from a multiple of that many on, must stay side by side.

    It decides which requests the kit tries, not their expected results. For a rule that needs more
    than its `tokens_per_row`, write a function with the decorator `@ids_together.register`.
    """
    return max(1, rule.tokens_per_row)


@ids_together.register
def _(rule: Striped) -> int:
    return rule.world * rule.run


@singledispatch
def hole_of(_rule: Rule) -> int:
    """The value in the rule's map for an id that leads to no row.

    For a rule with another value than -1, write a function with the decorator `@hole_of.register`.
    """
    return -1


@hole_of.register
def _(rule: Mapped) -> int:
    return rule.hole


def restored(
    geometry: Geometry, saved: Image, source: Place, before: Image, target: Place
) -> Image:
    """The image `before`, after the bytes of `source` in `saved` were restored to `target`."""
    expected = {part: rows.copy() for part, rows in before.items()}
    for plane in geometry.planes:
        source_rows, target_rows = rows_of_plane(plane, source), rows_of_plane(plane, target)
        for layer in range(plane.layer_count):
            part = plane.name, layer
            for token, row in source_rows.items():
                row_bytes = saved[part][row, : plane.row_bytes]
                expected[part][target_rows[token], : plane.row_bytes] = row_bytes
    return expected


def snapshot_bytes(geometry: Geometry, image: Image, place: Place) -> bytes:
    """A snapshot's bytes if each group of planes is a single chunk, or each row is several chunks.

    They come group by group, plane by plane, layer by layer, with the rows in order.
    """
    found = b""
    for rules in dict.fromkeys(plane.rules for plane in geometry.planes):
        for plane in geometry.planes:
            if plane.rules != rules:
                continue
            rows = rows_of_plane(plane, place).values()
            for layer in range(plane.layer_count):
                for row in rows:
                    found += image[plane.name, layer][row, : plane.row_bytes].tobytes()
    return found


def first_difference(expected: Image, found: Image) -> str | None:
    """The first difference of two images, in words; None if they are equal."""
    if expected.keys() != found.keys():
        return f"planes and layers are {sorted(found)}, not {sorted(expected)}"
    for (name, layer), rows in expected.items():
        other = found[name, layer]
        if rows.shape != other.shape:
            return f"plane {name}, layer {layer} is {other.shape}, not {rows.shape}"
        places = np.argwhere(rows != other)
        if len(places):
            row, byte = (int(number) for number in places[0])
            return (
                f"plane {name}, layer {layer}, row {row}, byte {byte} is "
                f"{other[row, byte]:#04x}, not {rows[row, byte]:#04x}; "
                f"{len(places):,} of {rows.size:,} bytes of that layer differ"
            )
    return None


@final
@dataclass(frozen=True)
class Units:
    """How many tokens must stay side by side for a layout's rows to stay whole."""

    slots: int
    """So many slots must stay side by side, from a multiple of that number on."""
    mapped: int
    """So many ids to which a map leads must stay side by side."""


def units_of(geometry: Geometry) -> Units:
    """The units that the rules before a map (`slots`) and after it (`mapped`) need."""
    slots = mapped = 1
    for plane in geometry.planes:
        before = after = 1
        is_mapped = False
        for rule in plane.rules:
            count, is_mapped = ids_together(rule), is_mapped or rule.map_name is not None
            before, after = (before, after * count) if is_mapped else (before * count, after)
        slots, mapped = lcm(slots, before), lcm(mapped, after)
    return Units(slots, mapped)


def map_holes(geometry: Geometry) -> dict[str, int]:
    """The value that means "no row", for each map that the layout's rules need, by name."""
    return {
        rule.map_name: hole_of(rule)
        for plane in geometry.planes
        for rule in plane.rules
        if rule.map_name is not None
    }


def mapped_count(geometry: Geometry, name: str, row_counts: Mapping[str, int]) -> int:
    """How many ids a map may lead to, so that each id has a row in every plane."""
    counts: list[int] = []
    for plane in geometry.planes:
        names = [rule.map_name for rule in plane.rules]
        if name in names:
            after = plane.rules[names.index(name) + 1 :]
            counts.append(row_counts[plane.name] * prod(map(ids_together, after)))
    return min(counts)


def is_of_request(plane: PlaneGeometry) -> bool:
    """Whether a row of the plane belongs to a request."""
    return any(rule.unit == "request" for rule in plane.rules)
