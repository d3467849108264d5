"""Plane, Layout, Geometry: the words in which a KV cache is declared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import final

from kvtide.errors import LayoutError
from kvtide.integers import LARGEST, checked_integer, integer_of, shown
from kvtide.layout.rules import Counts, EveryNth, EveryToken, OfRequest, Rule

DTYPE_BYTES = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "int16": 2, "float32": 4, "int32": 4, "int64": 8,
}  # fmt: skip

Size = int | Sequence[int]
"""Of an axis: how long it is, or for an axis of layers also which ones they are."""


@final
@dataclass(frozen=True, slots=True)
class Plane:
    """One named array of a token's, or a request's, state.

    `axes` names its axes, outermost first; a number is an axis of that size. Axes before `page`
    (or `request`) say how often the pool repeats, as with layers; those after are the row:

    - `page token …`: one token is one row.
    - `page … token …` or `page …`: the row is the page. It moves whole.
    - `request …`: one row a request; an `OfRequest` in `rows` says by which of its numbers.

    `rows` are the rules by which token slots name rows, one after another. `dtype` is given
    where it isn't that of the bind. An `optional` plane is left out of a geometry whose bind
    gives no size to an axis that only it has.
    """

    name: str
    axes: str
    rows: tuple[Rule, ...] = (EveryToken(),)
    dtype: str | None = None
    optional: bool = False

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All axes, those that are numbers too."""
        return tuple(self.axes.split())

    @property
    def sized_axes(self) -> frozenset[str]:
        """The axes that a bind gives sizes to; `token`'s is the page size."""
        return frozenset(
            name for name in self.axis_names if not name.isdecimal() and name not in _UNITS
        )

    def split(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """(`token`, `page` or `request`: what a row is; the axes before it; those of the row).

        Raises LayoutError for axes that make no rows.
        """
        names = self.axis_names
        named = [name for name in names if not name.isdecimal()]
        repeated = sorted({name for name in named if named.count(name) > 1})
        if repeated:
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} names {repeated} twice")
        units = [name for name in names if name in _UNITS]
        if len(units) != 1:
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} must name 'page' or 'request'")
        at = names.index(units[0])
        before, after = names[:at], names[at + 1 :]
        if "token" in before or ("token" in after and units == ["request"]):
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} has 'token' outside of a page")
        if after[:1] == ("token",):
            return "token", before, after[1:]
        return units[0], before, after


_UNITS = ("page", "request")


@final
@dataclass(frozen=True, slots=True)
class PlaneGeometry:
    """A plane with its sizes: `layer_count` times [row, *row_shape] of `dtype`."""

    name: str
    dtype: str
    layer_count: int
    row_shape: tuple[int, ...]
    rules: tuple[Rule, ...] = (EveryToken(),)
    """From token slots to rows; that of a page, or of a request, is the last."""

    @property
    def tokens_per_row(self) -> int:
        """The most tokens that a row stands for; 0 for a request's row."""
        return prod(rule.tokens_per_row for rule in self.rules)

    @property
    def is_dense(self) -> bool:
        """Whether the slots name all rows in order, so that rows tell how many slots there are."""
        return all(rule.is_dense for rule in self.rules)

    def row_count(self, slot_count: int, known: Counts) -> int:
        """The rows in a pool of so many slots; LayoutError where what is `known` doesn't say."""
        count = slot_count
        for rule in self.rules:
            count = rule.row_count(count, known)
        if count < 1:
            raise LayoutError(
                f"plane {self.name!r} has no rows by {self.rules}; give request_count or "
                "mapped_rows"
            )
        return count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return self.layer_count * self.row_bytes


@final
@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Planes under one name: all that a token or a request owns, and how its bytes lie."""

    name: str
    planes: tuple[Plane, ...]

    def __init__(self, name: str, *planes: Plane) -> None:
        """Raises LayoutError for no planes, planes of one name, or axes that don't make rows."""
        names = [plane.name for plane in planes]
        if not planes or len(set(names)) < len(names):
            raise LayoutError(f"layout {name!r}: plane names {names} must be distinct, at least 1")
        for plane in planes:
            plane.split()
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "planes", planes)

    def through(self, name: str, *rules: Rule) -> Layout:
        """This layout under another name, its rows named by these rules in addition.

        They come after the planes' own: `WINDOW.through("window_dcp", Striped(1, 4))`.
        """
        return Layout(name, *(replace(plane, rows=(*plane.rows, *rules)) for plane in self.planes))

    @classmethod
    def joined(cls, name: str, **parts: Layout) -> Layout:
        """Layouts whose slots are the same tokens' as one, which moves all or nothing.

        Planes get their part's name before their own, `full.k`, and so do the axes, but for
        `page`, `token`, `request` and numbers: `full_layer`, `draft_head_dim`.
        """
        planes = [
            replace(
                plane,
                name=f"{part}.{plane.name}",
                axes=" ".join(
                    axis if axis in (*_UNITS, "token") or axis.isdecimal() else f"{part}_{axis}"
                    for axis in plane.axis_names
                ),
            )
            for part, layout in parts.items()
            for plane in layout.planes
        ]
        return cls(name, *planes)

    def bind(
        self,
        *,
        dtype: str | Mapping[str, str],
        token: int = 1,
        first_layer: int = 0,
        rank: int = 0,
        **sizes: Size,
    ) -> Geometry:
        """This layout with every axis given its size; `token` is the page size in tokens.

        `dtype` is that of all planes that declare none, or of each by name. An axis of layers
        may be given as the layers' numbers, where a plane lives in some of them only.
        `first_layer` and `rank` say which pipeline stage and which tensor-parallel rank the
        pool belongs to. They change no size, but KV of one is never KV of another. Raises
        LayoutError for an axis without a size, a size without an axis, or one below 1.
        """
        given = frozenset(sizes)
        needed = {axis for plane in self.planes if not plane.optional for axis in plane.sized_axes}
        needed.add("token")
        planes = [
            plane
            for plane in self.planes
            if not plane.optional or not (plane.sized_axes - needed - given)
        ]
        axes = {axis for plane in planes for axis in plane.sized_axes} - {"token"}
        if axes != given:
            raise LayoutError(
                f"layout {self.name!r}: sizes needed for {sorted(axes)}, given for {sorted(given)}"
            )
        page_size = _exact(token)
        exact = {axis: _exact(size) for axis, size in sizes.items()}
        exact["token"] = page_size if isinstance(page_size, int) else 0
        counts = {
            axis: size if isinstance(size, int) else len(size) for axis, size in exact.items()
        }
        low = [axis for axis in counts if counts[axis] < 1]
        if low:
            given_low = ", ".join(f"{one}={shown(sizes.get(one, token))}" for one in low)
            raise LayoutError(
                f"layout {self.name!r}: sizes must be integers from 1, not {given_low}"
            )
        what = f"layout {self.name!r}"
        first_layer = checked_integer(first_layer, f"{what}: first_layer", error=LayoutError)
        rank = checked_integer(rank, f"{what}: rank", error=LayoutError)
        dtypes = {plane.name: self._dtype_of(plane, dtype) for plane in planes}
        identity = tuple((axis, exact[axis]) for axis in sorted(sizes))
        return Geometry(
            self,
            tuple(_with_sizes(plane, counts, dtypes[plane.name]) for plane in planes),
            counts["token"],
            first_layer,
            rank,
            identity,
        )

    def _dtype_of(self, plane: Plane, given: str | Mapping[str, str]) -> str:
        if isinstance(given, str):
            dtype = plane.dtype or given
        else:
            dtype = given.get(plane.name) or plane.dtype or "none"
        if dtype not in DTYPE_BYTES:
            raise LayoutError(
                f"layout {self.name!r}, plane {plane.name!r}: dtype {dtype!r} isn't one of "
                f"{[*DTYPE_BYTES]}"
            )
        return dtype


def _exact(size: object) -> int | tuple[int, ...]:
    """A size in Python's integers; 0 or none for what is no size."""
    number = integer_of(size)
    if number is not None:
        return number if number <= LARGEST else 0
    if not isinstance(size, list | tuple | range):
        return 0
    numbers = [integer_of(one) for one in size]
    exact = tuple(one for one in numbers if one is not None and one >= 0)
    return exact if len(exact) == len(numbers) == len(set(exact)) else ()


def _with_sizes(plane: Plane, counts: Mapping[str, int], dtype: str) -> PlaneGeometry:
    unit, before, row = plane.split()

    def sizes_of(axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(int(axis) if axis.isdecimal() else counts[axis] for axis in axes)

    rules = plane.rows
    if unit == "page":
        rules = (*rules, EveryNth(counts["token"]))
    if unit == "request" and all(rule.unit != "request" for rule in rules):
        rules = (OfRequest(),)
    return PlaneGeometry(plane.name, dtype, prod(sizes_of(before)), sizes_of(row), rules)


@final
@dataclass(frozen=True)
class Geometry:
    """A layout with its sizes, made by `Layout.bind`; how many rows there are is the pool's."""

    layout: Layout
    planes: tuple[PlaneGeometry, ...]
    page_size: int
    first_layer: int
    rank: int
    sizes: tuple[tuple[str, int | tuple[int, ...]], ...]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token owns, over all planes and layers; shared rows count in part."""
        return -(-self.page_bytes // self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all planes and layers."""
        return sum(
            -(-self.page_size // plane.tokens_per_row) * plane.size_bytes
            for plane in self.planes
            if plane.tokens_per_row
        )

    @property
    def request_bytes(self) -> int:
        """Bytes that a request owns beside its tokens', over all planes and layers."""
        return sum(plane.size_bytes for plane in self.planes if not plane.tokens_per_row)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever layout, sizes, dtypes, stage or rank do.

        The page size is left out where no row is a page: it says how slots are handed out, not
        which bytes a token owns, so a snapshot may move between pools of different page sizes.
        """
        planes = tuple(
            (plane.name, plane.dtype, plane.layer_count, plane.row_shape, repr(plane.rules))
            for plane in self.planes
        )
        axes = tuple((plane.name, plane.axes) for plane in self.layout.planes)
        stage = (self.first_layer, self.rank)
        text = repr((self.layout.name, axes, planes, stage, self.sizes))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
