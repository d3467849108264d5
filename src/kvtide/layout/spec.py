"""Layout declares the planes that a token or a request owns; Geometry has their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from kvtide.errors import LayoutError
from kvtide.integers import LARGEST, checked_integer, shown
from kvtide.layout.canonical import (
    FORM_VERSION,
    canonical_json,
    checked_list,
    checked_object,
    checked_text,
    differences,
    fingerprint_of,
    require_version,
)
from kvtide.layout.dtypes import checked_dtype
from kvtide.layout.plane import (
    MOST_RULES,
    UNITS,
    Plane,
    PlaneGeometry,
    Size,
    Sizes,
    exact_size,
)
from kvtide.layout.rule import Rule


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
        """This layout under another name, with these rules after the rules of each plane.

        For example `WINDOW.through("window_dcp", Striped(1, 4))`.
        """
        return Layout(name, *(replace(plane, rows=(*plane.rows, *rules)) for plane in self.planes))

    @classmethod
    def joined(cls, name: str, **parts: Layout) -> Layout:
        """Several layouts as one: their slots belong to the same tokens, and they move together.

        The name of a plane begins with its part's name, as in `full.k`. So does the name of an
        axis, as in `full_layer` or `draft_head_dim`, except `page`, `token` and `request`.
        """
        planes = [
            replace(
                plane,
                name=f"{part}.{plane.name}",
                axes=" ".join(
                    axis if axis in (*UNITS, "token") or axis.isdecimal() else f"{part}_{axis}"
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
        """This layout with a size for each axis; `token` is the page size in tokens.

        `dtype` is the dtype of all planes that declare none, or of each plane by name. The size of
        an axis of layers may be the layers' numbers, where only some layers have a plane.
        `first_layer` and `rank` say which pipeline stage and which tensor-parallel rank the pool
        belongs to. They change no size, but the KV of different ranks or stages is never the same.
        Raises LayoutError for an axis without a size, a size without an axis, or a size below 1.
        """
        planes = self._planes_with(frozenset(sizes))
        exact = self._checked({"token": token, **sizes})
        page_size = exact.pop("token")
        if not isinstance(page_size, int):
            raise LayoutError(f"layout {self.name!r}: token={shown(token)} must be an integer")
        dtypes = {plane.name: self._dtype_of(plane, dtype) for plane in planes}
        return self._bound(planes, exact, page_size, dtypes, first_layer, rank)

    def _bound(
        self,
        planes: Sequence[Plane],
        sizes: Sizes,
        page_size: int,
        dtypes: Mapping[str, str],
        first_layer: object,
        rank: object,
    ) -> Geometry:
        """These planes with sizes that have been checked."""
        what = f"layout {self.name!r}"
        geometry = Geometry(
            self,
            tuple(plane.bound(sizes, page_size, dtypes[plane.name]) for plane in planes),
            page_size,
            checked_integer(first_layer, f"{what}: first_layer", error=LayoutError),
            checked_integer(rank, f"{what}: rank", error=LayoutError),
            tuple((axis, sizes[axis]) for axis in sorted(sizes)),
        )
        if geometry.page_bytes + geometry.request_bytes > LARGEST:
            raise LayoutError(f"{what}: a page and a request have more than {LARGEST} bytes")
        _refuse_alike(geometry)
        return geometry

    def _checked(self, sizes: Mapping[str, Size]) -> dict[str, int | tuple[int, ...]]:
        """The sizes as Python's integers; raises LayoutError, which names the invalid ones."""
        exact = {axis: exact_size(size) for axis, size in sizes.items()}
        wrong = ", ".join(f"{axis}={shown(sizes[axis])}" for axis in sizes if exact[axis] is None)
        if wrong:
            raise LayoutError(f"layout {self.name!r}: sizes must be integers from 1, not {wrong}")
        return {axis: size for axis, size in exact.items() if size is not None}

    def _planes_with(self, given: frozenset[str]) -> list[Plane]:
        """The planes whose axes have sizes; raises LayoutError for missing or extra sizes."""
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
        return planes

    def _dtype_of(self, plane: Plane, given: str | Mapping[str, str]) -> str:
        if isinstance(given, str):
            dtype = plane.dtype or given
        else:
            dtype = given.get(plane.name) or plane.dtype or "none"
        return checked_dtype(dtype, f"layout {self.name!r}, plane {plane.name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The declaration in JSON's types."""
        return {"name": self.name, "planes": [plane.to_dict() for plane in self.planes]}

    @classmethod
    def from_dict(cls, form: object) -> Layout:
        """The layout that `to_dict` gave; LayoutError for anything else."""
        given = checked_object(form, ("name", "planes"), "a layout")
        name = checked_text(given["name"], "a layout's name")
        planes = checked_list(given["planes"], f"layout {name!r}: planes")
        return cls(name, *map(Plane.from_dict, planes))


@final
@dataclass(frozen=True)
class Geometry:
    """A layout with its sizes, made by `Layout.bind`. The pool says how many rows there are."""

    layout: Layout
    planes: tuple[PlaneGeometry, ...]
    page_size: int
    first_layer: int
    rank: int
    sizes: tuple[tuple[str, int | tuple[int, ...]], ...]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token owns in all planes and layers; of a page's bytes it owns its share."""
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
        """Bytes that a request owns in all planes and layers, without the bytes of its tokens."""
        return sum(plane.size_bytes for plane in self.planes if not plane.tokens_per_row)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The number of each plane's group: planes of equal rules take the same rows."""
        distinct = self._chains
        return tuple(distinct.index(plane.rules) for plane in self.planes)

    @property
    def _chains(self) -> list[tuple[Rule, ...]]:
        """The rules of each group, in the order of their first planes."""
        return list(dict.fromkeys(plane.rules for plane in self.planes))

    def to_dict(self) -> dict[str, Any]:
        """The form of the geometry in JSON's types: see kvtide.layout.canonical.

        It leaves out the layout's name and what holds for one pool alone, such as the page size
        where no row is a page. A snapshot may move between pools that differ in nothing else.
        """
        return {
            "version": FORM_VERSION,
            "first_layer": self.first_layer,
            "rank": self.rank,
            "groups": [[rule.content() for rule in chain] for chain in self._chains],
            "planes": [
                plane.to_dict(group) for plane, group in zip(self.planes, self.groups, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, form: object, name: str = "geometry") -> Geometry:
        """The geometry with that form; its layout gets the name `name`.

        Raises LayoutError for a form of another version, an unknown rule or dtype, missing or
        extra keys, bad sizes, or a form that isn't canonical.
        """
        require_version(form)
        keys = ("version", "first_layer", "rank", "groups", "planes")
        given = checked_object(form, keys, "a geometry's form")
        groups = [
            tuple(map(Rule.from_dict, checked_list(chain, "a group's rules", MOST_RULES)))
            for chain in checked_list(given["groups"], "a geometry's groups")
        ]
        listed = checked_list(given["planes"], "a geometry's planes")
        planes = [PlaneGeometry.from_dict(plane, groups) for plane in listed]
        layout = Layout(name, *(plane.declared for plane in planes))
        dtypes = {plane.name: plane.dtype for plane in planes}
        page_size = max(plane.page_size for plane in planes)
        geometry = layout._bound(
            layout.planes, _sizes_of(planes), page_size, dtypes, given["first_layer"], given["rank"]
        )
        if geometry.canonical != canonical_json(form):
            lines = "; ".join(differences(geometry.to_dict(), form))
            raise LayoutError(f"a geometry's form isn't canonical: {lines}")
        return geometry

    @cached_property
    def canonical(self) -> str:
        """`to_dict` as canonical JSON: equal where two geometries own the same bytes."""
        return canonical_json(self.to_dict())

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever `canonical` does."""
        return fingerprint_of(self.canonical)


def _refuse_alike(geometry: Geometry) -> None:
    """Raises LayoutError if rules of two planes differ only in their local fields (`Rule.local`).

    The geometry's form leaves these out. Whoever reads the form would take the two planes for one
    group, but here they own different rows.
    """
    seen: dict[str, tuple[Rule, ...]] = {}
    for plane in geometry.planes:
        content = canonical_json([rule.content() for rule in plane.rules])
        if seen.setdefault(content, plane.rules) != plane.rules:
            raise LayoutError(
                f"layout {geometry.layout.name!r}, plane {plane.name!r}: rules {plane.rules} "
                f"differ from another plane's {seen[content]} in nothing that is content; make "
                "them equal"
            )


def _sizes_of(planes: Sequence[PlaneGeometry]) -> dict[str, int | tuple[int, ...]]:
    """The sizes of all planes' axes by name; LayoutError for a name with two sizes."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    for plane in planes:
        for axis, size in (*plane.layers, *plane.row):
            if axis == "token" or axis.isdecimal():
                continue
            if sizes.setdefault(axis, size) != size:
                raise LayoutError(
                    f"plane {plane.name!r}: axis {axis!r} is {shown(size)} here, "
                    f"{shown(sizes[axis])} in another plane"
                )
    return sizes
