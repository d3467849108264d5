"""Plane, Layout, Geometry: the words in which a KV cache is declared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import final

from kvtide.errors import LayoutError

DTYPE_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


@final
@dataclass(frozen=True, slots=True)
class EveryToken:
    """The row rule of attention without a window: token slot s owns row s of each layer."""


@final
@dataclass(frozen=True, slots=True)
class Plane:
    """One named array of a token's state.

    `axes` names its axes, outermost first. `page token` side by side make one token one row:
    axes before them say how often the pool repeats (layers), axes after them are the row.
    """

    name: str
    axes: str
    rows: EveryToken = EveryToken()

    def axes_around_token(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes before `page token`, and those after; LayoutError where they don't adjoin."""
        names = tuple(self.axes.split())
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} names {repeated} twice")
        if "page" not in names or names[names.index("page") + 1 :][:1] != ("token",):
            raise LayoutError(
                f"plane {self.name!r}: {self.axes!r} must name 'page token' side by side, "
                "so that one token is one row"
            )
        at = names.index("page")
        return names[:at], names[at + 2 :]


@final
@dataclass(frozen=True, slots=True)
class PlaneGeometry:
    """A plane with its sizes: `layer_count` times [slot, *row_shape] of `dtype`."""

    name: str
    dtype: str
    layer_count: int
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes that one token owns in one layer of this plane."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]


@final
@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Planes under one name: all that a token owns, and how its bytes lie."""

    name: str
    planes: tuple[Plane, ...]

    def __init__(self, name: str, *planes: Plane) -> None:
        """Raises LayoutError for no planes, planes of one name, or axes that don't make rows."""
        names = [plane.name for plane in planes]
        if not planes or len(set(names)) < len(names):
            raise LayoutError(f"layout {name!r}: plane names {names} must be distinct, at least 1")
        for plane in planes:
            plane.axes_around_token()
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "planes", planes)

    def bind(self, *, dtype: str, first_layer: int = 0, rank: int = 0, **sizes: int) -> Geometry:
        """This layout with every axis given its size; `token` is the page size in tokens.

        `first_layer` and `rank` say which pipeline stage and which tensor-parallel rank the
        pool belongs to. They change no size, but KV of one is never KV of another. Raises
        LayoutError for an axis without a size, a size without an axis, or one below 1.
        """
        if dtype not in DTYPE_BYTES:
            raise LayoutError(
                f"layout {self.name!r}: dtype {dtype!r} isn't one of {[*DTYPE_BYTES]}"
            )
        axes = {name for plane in self.planes for name in plane.axes.split()} - {"page"}
        if axes != set(sizes):
            raise LayoutError(
                f"layout {self.name!r}: sizes needed for {sorted(axes)}, given for {sorted(sizes)}"
            )
        low = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        if low:
            raise LayoutError(f"layout {self.name!r}: sizes must be integers from 1, not {low}")
        ordered = tuple(sorted(sizes.items()))
        return Geometry(self, dtype, first_layer, rank, ordered)


@final
@dataclass(frozen=True, slots=True)
class Geometry:
    """A layout with its sizes, made by `Layout.bind`; the number of pages is the pool's."""

    layout: Layout
    dtype: str
    first_layer: int
    rank: int
    sizes: tuple[tuple[str, int], ...]

    @property
    def planes(self) -> tuple[PlaneGeometry, ...]:
        """The layout's planes in their order, with sizes."""
        sizes = dict(self.sizes)
        return tuple(
            PlaneGeometry(
                plane.name,
                self.dtype,
                prod(sizes[name] for name in plane.axes_around_token()[0]),
                tuple(sizes[name] for name in plane.axes_around_token()[1]),
            )
            for plane in self.layout.planes
        )

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return dict(self.sizes)["token"]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token owns, over all planes and layers."""
        return sum(plane.layer_count * plane.row_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all planes and layers."""
        return self.page_size * self.token_bytes

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever layout, sizes, dtype, stage or rank do.

        The page size is left out: it says how slots are handed out, not which bytes a token
        owns, so a snapshot may move between pools of different page sizes.
        """
        sizes = tuple((name, size) for name, size in self.sizes if name != "token")
        planes = tuple((plane.name, plane.axes, repr(plane.rows)) for plane in self.layout.planes)
        text = repr((self.layout.name, planes, self.dtype, self.first_layer, self.rank, sizes))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
