"""Plane declares one named array of a token's or a request's state; PlaneGeometry has its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final, get_args

from kvtide.errors import LayoutError
from kvtide.integers import LARGEST, integer_of, shown
from kvtide.layout.canonical import checked_list, checked_object, checked_text
from kvtide.layout.dtypes import DTYPE_BYTES, checked_dtype
from kvtide.layout.rule import Counts, Rule, Unit
from kvtide.layout.rules import EveryNth, EveryToken, OfRequest

Size = int | Sequence[int]
"""The length of an axis, or for an axis of layers the numbers of the layers."""
Axis = tuple[str, int | tuple[int, ...]]
"""The name of an axis, and its length; the layers' numbers where these aren't 0 to n - 1."""
Sizes = Mapping[str, int | tuple[int, ...]]
"""The sizes of axes by name."""
UNITS = ("page", "request")
MOST_AXES = MOST_RULES = 16
"""The most axes, and the most rules, of a plane that is read from a form."""
LONGEST_NAME = 1000
"""The most characters in the name of an axis that is read from a form."""


@final
@dataclass(frozen=True, slots=True)
class Plane:
    """One named array of a token's or a request's state.

    `axes` names its axes, outermost first; a number is an axis of that size. The axes before `page`
    (or `request`) say how often the array is repeated, for layers; the axes after it are the row:

    - `page token …`: one token is one row.
    - `page … token …` or `page …`: the row is the page. It moves whole.
    - `request …`: one row a request; an `OfRequest` in `rows` says which of its rows.

    `rows` are the rules that lead from token slots to rows, one after another. `dtype` is given
    where the plane has another one than the rest. An `optional` plane is left out of a geometry
    if `bind` gives no size to an axis that only this plane has.
    """

    name: str
    axes: str
    rows: tuple[Rule, ...] = (EveryToken(),)
    dtype: str | None = None
    optional: bool = False

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of all axes; an axis without a name has its size there."""
        return tuple(self.axes.split())

    @property
    def sized_axes(self) -> frozenset[str]:
        """The axes that a bind gives sizes to; `token`'s is the page size."""
        return frozenset(
            name for name in self.axis_names if not name.isdecimal() and name not in UNITS
        )

    def split(self) -> tuple[Unit, tuple[str, ...], tuple[str, ...]]:
        """The row's unit (`token`, `page` or `request`), the axes before it, and the row's axes.

        Raises LayoutError for axes that make no rows.
        """
        names = self.axis_names
        named = [name for name in names if not name.isdecimal()]
        repeated = sorted({name for name in named if named.count(name) > 1})
        if repeated:
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} names {repeated} twice")
        if any(name.isdecimal() and int(name) < 1 for name in names):
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} has an axis without elements")
        units = [name for name in names if name in UNITS]
        if len(units) != 1:
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} must name 'page' or 'request'")
        place = names.index(units[0])
        before, after = names[:place], names[place + 1 :]
        if "token" in before or ("token" in after and units == ["request"]):
            raise LayoutError(f"plane {self.name!r}: {self.axes!r} has 'token' outside of a page")
        if units == ["request"]:
            return "request", before, after
        if after[:1] == ("token",):
            return "token", before, after[1:]
        return "page", before, after

    def bound(self, sizes: Sizes, page_size: int, dtype: str) -> PlaneGeometry:
        """The plane with its axes' sizes, each of which is at least 1.

        If the bytes of each token of a page lie together, a row is a token, whatever the order of
        the axes: with a single head, heads first is the same as tokens first.
        """
        unit, before, after = self.split()
        layers, row = (
            tuple(_axis(name, {**sizes, "token": page_size}) for name in names)
            for names in (before, after)
        )
        rules = tuple(rule for rule in self.rows if not rule.is_identity)
        if unit == "page" and _has_token_rows(row, page_size):
            unit, row = "token", tuple(axis for axis in row if axis[0] != "token")
        if unit == "page":
            rules = (*rules, EveryNth(page_size))
        if unit == "request" and all(rule.unit != "request" for rule in rules):
            rules = (OfRequest(),)
        return PlaneGeometry(self.name, dtype, layers, row, unit, rules)

    def to_dict(self) -> dict[str, Any]:
        """The declaration in JSON's types."""
        return {
            "name": self.name,
            "axes": self.axes,
            "rows": [rule.to_dict() for rule in self.rows],
            "dtype": self.dtype,
            "optional": self.optional,
        }

    @classmethod
    def from_dict(cls, form: object) -> Plane:
        """The plane that `to_dict` gave; LayoutError for anything else."""
        keys = ("name", "axes", "rows", "dtype", "optional")
        given = checked_object(form, keys, "a plane")
        name = checked_text(given["name"], "a plane's name")
        what = f"plane {name!r}"
        axes, dtype = checked_text(given["axes"], f"{what}: axes"), given["dtype"]
        rows = tuple(map(Rule.from_dict, checked_list(given["rows"], f"{what}: rows")))
        if dtype is not None:
            dtype = checked_dtype(dtype, what)
        if not isinstance(given["optional"], bool):
            raise LayoutError(f"{what}: optional must be a bool, not {shown(given['optional'])}")
        plane = cls(name, axes, rows, dtype, given["optional"])
        plane.split()
        return plane


def exact_size(size: object) -> int | tuple[int, ...] | None:
    """The size as Python's integers, or None if it is invalid."""
    number = integer_of(size)
    if number is not None:
        return number if 1 <= number <= LARGEST else None
    if not isinstance(size, list | tuple | range):
        return None
    numbers = [integer_of(number) for number in size]
    exact = tuple(number for number in numbers if number is not None and 0 <= number <= LARGEST)
    return exact if exact and len(exact) == len(numbers) == len(set(exact)) else None


def _axis(name: str, sizes: Sizes) -> Axis:
    if name.isdecimal():
        return str(int(name)), int(name)
    size = sizes[name]
    is_count = isinstance(size, tuple) and size == tuple(range(len(size)))
    return name, _length(size) if is_count else size


def _length(size: int | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else len(size)


def _has_token_rows(row: tuple[Axis, ...], page_size: int) -> bool:
    """Whether each token of a page has its bytes in one place, though the row is the page."""
    names = [name for name, _ in row]
    outer = row[: names.index("token")] if "token" in names else None
    return page_size == 1 or (outer is not None and all(_length(size) == 1 for _, size in outer))


@final
@dataclass(frozen=True, slots=True)
class PlaneGeometry:
    """A plane with its sizes: `layer_count` times [row, *row_shape] of `dtype`."""

    name: str
    dtype: str
    layers: tuple[Axis, ...]
    """The axes that repeat the plane, with their sizes, outermost first."""
    row: tuple[Axis, ...]
    """The axes of a row; `token` is one of them only where a row holds the tokens of a page."""
    unit: Unit = "token"
    """What a row belongs to."""
    rules: tuple[Rule, ...] = ()
    """The rules that lead from token slots to rows; the rule of the page is the last."""

    @property
    def layer_count(self) -> int:
        """How many layers have the plane."""
        return prod(_length(size) for _, size in self.layers)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The sizes of a row's axes."""
        return tuple(_length(size) for _, size in self.row)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of one row in all layers."""
        return self.layer_count * self.row_bytes

    @property
    def tokens_per_row(self) -> int:
        """The most tokens that a row stands for; 0 for a request's row."""
        return prod(rule.tokens_per_row for rule in self.rules)

    @property
    def is_dense(self) -> bool:
        """Whether the slots name all rows in order, so that rows tell how many slots there are."""
        return all(rule.is_dense for rule in self.rules)

    def row_count(self, slot_count: int, known: Counts) -> int:
        """The rows in a pool of `slot_count` slots; LayoutError if `known` doesn't say enough."""
        count = slot_count
        for rule in self.rules:
            count = rule.row_count(count, known)
        if count < 1:
            raise LayoutError(
                f"plane {self.name!r} has no rows by {self.rules}; give request_count or "
                "mapped_rows"
            )
        return count

    def to_dict(self, group: int) -> dict[str, Any]:
        """The plane in a geometry's form, with the number of its group: see layout.canonical."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "group": group,
            "unit": self.unit,
            "layers": _axes_to_lists(self.layers),
            "row": _axes_to_lists(self.row),
        }

    @classmethod
    def from_dict(cls, form: object, groups: Sequence[tuple[Rule, ...]]) -> PlaneGeometry:
        """A plane from a geometry's form, whose groups have these rules; LayoutError otherwise."""
        keys = ("name", "dtype", "group", "unit", "layers", "row")
        given = checked_object(form, keys, "a plane")
        name = checked_text(given["name"], "a plane's name")
        what, group, unit = f"plane {shown(name)}", integer_of(given["group"]), given["unit"]
        if group is None or not 0 <= group < len(groups):
            raise LayoutError(
                f"{what}: group {shown(given['group'])} isn't in 0 … {len(groups) - 1}"
            )
        if unit not in get_args(Unit):
            raise LayoutError(f"{what}: unit {shown(unit)} isn't one of {get_args(Unit)}")
        dtype = checked_dtype(given["dtype"], what)
        layers, row = (_axes_of(given[key], f"{what}: {key}") for key in ("layers", "row"))
        return cls(name, dtype, layers, row, unit, groups[group])

    @property
    def declared(self) -> Plane:
        """A plane that has this geometry when it is bound to these sizes."""
        lead = {"token": ["page", "token"], "page": ["page"], "request": ["request"]}[self.unit]
        axes = [*(name for name, _ in self.layers), *lead, *(name for name, _ in self.row)]
        rules = self.rules[:-1] if self.unit == "page" else self.rules
        return Plane(self.name, " ".join(axes), rules, self.dtype)

    @property
    def page_size(self) -> int:
        """Tokens in a page where a row is a page; otherwise 1."""
        return self.rules[-1].tokens_per_row if self.unit == "page" and self.rules else 1


def _axes_of(form: object, what: str) -> tuple[Axis, ...]:
    """Axes from a form; LayoutError for bad names or sizes."""
    axes: list[Axis] = []
    for axis in checked_list(form, what, MOST_AXES):
        if not isinstance(axis, list) or len(axis) != 2:
            raise LayoutError(f"{what}: an axis must be [name, size], not {shown(axis)}")
        name, size = axis
        if not isinstance(name, str) or name.split() != [name] or len(name) > LONGEST_NAME:
            raise LayoutError(f"{what}: an axis' name can't be {shown(name)}")
        exact = exact_size(size)
        if exact is None:
            raise LayoutError(
                f"{what}: the size of {shown(name)} must be an integer from 1, or the numbers of "
                f"layers, not {shown(size)}"
            )
        axes.append((name, exact))
    return tuple(axes)


def _axes_to_lists(axes: tuple[Axis, ...]) -> list[list[Any]]:
    return [[name, size if isinstance(size, int) else [*size]] for name, size in axes]
