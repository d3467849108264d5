"""Rule: the interface of row rules, which lead from a request's token slots to rows. Pure.

A rule takes ids in the order of the request's tokens and gives other ids. A chain of rules begins
with token slots and ends with rows of a buffer. Each id carries the number of its token (of its
first token, where a row holds several). By this number a restore finds the row at the target that
stands for the same token as the saved row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast, final

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import LayoutError
from kvtide.integers import checked_integer, shown
from kvtide.layout.canonical import checked_object

Ids = NDArray[np.int64]
Maps = Mapping[str, Callable[[Ids], Ids]]
"""An engine's maps by name: functions from ids to as many ids."""
Unit = Literal["token", "page", "request"]
"""What a row belongs to: a token, a page or another run of consecutive tokens, or a request."""
RequestRows = int | Mapping[str, int] | None
"""The number of a request's row; where a request has rows of several kinds, the number by kind."""


@final
@dataclass(frozen=True, slots=True)
class Counts:
    """A pool's counts beside its slots: requests that have rows, and ids that each map leads to."""

    request_count: int = 0
    mapped_rows: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a buffer, int64 [row], and for each row the number of its first token, int64 [row].

    `lasts` are the numbers of the rows' last tokens, int64 [row], or None where each row stands
    for one token. `after_hole` (bool [row]) says which rows don't continue the row before them,
    since a token or a place between the two is left out; None if all do.
    """

    ids: Ids
    tokens: Ids
    lasts: Ids | None = None
    after_hole: NDArray[np.bool_] | None = None

    def only(self, kept: NDArray[np.bool_], ids: Ids) -> Rows:
        """The rows that are `kept` (bool [row]), with other `ids`, int64 [kept row]."""
        lasts = None if self.lasts is None else self.lasts[kept]
        holes = self.after_hole
        if holes is not None:
            counts = np.cumsum(holes)[kept]  # holes up to a row, those before dropped rows too
            holes = np.diff(counts, prepend=0) > 0
        return Rows(ids, self.tokens[kept], lasts, holes)

    def of_tokens(self, tokens: Ids) -> Ids | None:
        """The rows that stand for these tokens (ascending), or None if one of them has no row."""
        places = np.searchsorted(self.tokens, tokens)
        if places.size and places[-1] >= self.tokens.size:
            return None
        return None if (self.tokens[places] != tokens).any() else self.ids[places]


class Rule(ABC):
    """One step from token slots to rows: it takes ids and gives ids.

    To add a rule, inherit this class as a frozen dataclass and implement what is abstract here.
    The fields are strings and integers. Rules that are equal lead to the same rows. A class is
    known to `from_dict` by its `form_name` as soon as it is defined.
    """

    __slots__ = ()
    form_name: ClassVar[str]
    """The rule's name in forms. It never changes, and no other rule has the same name."""
    local: ClassVar[Mapping[str, int]] = {}
    """Fields that hold for one pool alone, such as the width of an engine's table. They don't say
    which tokens a row stands for, so `content` leaves them out, and `from_dict` fills in these
    values where they are missing."""

    def __init_subclass__(cls) -> None:
        """Raises LayoutError for a class without a form name, or with another rule's form name."""
        name = vars(cls).get("form_name")
        if not isinstance(name, str):
            raise LayoutError(f"rule {cls.__name__}: give it a form_name, a string of its own")
        known = _RULES.setdefault(name, cls)
        # A dataclass with slots is made twice: first without them.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise LayoutError(
                f"rule {cls.__name__}: its form_name {name!r} is {known.__qualname__}'s already; "
                "choose another"
            )
        _RULES[name] = cls

    @abstractmethod
    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """The rows to which the ids of `rows` lead. Raises SlotError, which names a bad id."""

    @abstractmethod
    def row_count(self, id_count: int, known: Counts) -> int:
        """How many ids the rule leads to from `id_count` ids; 0 if `known` doesn't say."""

    @property
    @abstractmethod
    def tokens_per_row(self) -> int:
        """How many consecutive ids share a row; 0 where the row belongs to the request."""

    @property
    def unit(self) -> Unit:
        """What a row belongs to, in the words of `Plane.split`."""
        tokens = self.tokens_per_row
        return "request" if tokens == 0 else "token" if tokens == 1 else "page"

    @property
    def is_dense(self) -> bool:
        """Whether ids 0, 1, 2 … name all rows in order: then rows tell how many ids there are."""
        return False

    @property
    def is_identity(self) -> bool:
        """Whether each id names the row of the same number, so that the rule changes nothing."""
        return False

    @property
    def kind(self) -> str | None:
        """The kind of the request's row that the caller must name; None if the rule needs none."""
        return None

    @property
    def map_name(self) -> str | None:
        """The name of the engine's map that the rule needs; None if it needs none."""
        return None

    def with_map_under(self, prefix: str) -> Rule:
        """The same rule with its map, if it needs one, under the name `prefix.map_name`."""
        assert self.map_name is None, f"{self} needs a with_map_under, for {prefix!r}"
        return self

    def to_dict(self) -> dict[str, Any]:
        """The rule in JSON's types: its form name as `rule`, and all its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        _check_values(self.form_name, values)
        return {"rule": self.form_name, **values}

    def content(self) -> dict[str, Any]:
        """The fields that say which tokens a row stands for: `to_dict` without `local` fields."""
        return {name: value for name, value in self.to_dict().items() if name not in self.local}

    @staticmethod
    def from_dict(form: object) -> Rule:
        """The rule that `to_dict` or `content` gave.

        Raises LayoutError, naming it, for an unknown rule, and for missing, extra or bad fields.
        """
        name = checked_object(form, ["rule"], "a rule", others=True)["rule"]
        kind = _RULES.get(name) if isinstance(name, str) else None
        if kind is None:
            raise LayoutError(
                f"rule {shown(name)} is unknown here, known are {sorted(_RULES)}; import the "
                "module that defines it, or use the kvtide that wrote it"
            )
        what = f"rule {name!r}"
        needed = {field.name for field in fields(cast(Any, kind))} - kind.local.keys()
        given = checked_object(form, {"rule", *needed}, what, optional=kind.local)
        values = {**kind.local, **{key: given[key] for key in given if key != "rule"}}
        _check_values(kind.form_name, values)
        return kind(**values)


_RULES: dict[str, type[Rule]] = {}


def _check_values(rule: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise LayoutError(
                f"rule {rule!r}: {name} must be a string or an integer, not {shown(value)}"
            )


def require_integer(rule: Rule, name: str, least: int) -> None:
    """Raises LayoutError unless the field is an integer from `least`; makes it a Python integer."""
    what = f"{type(rule).__name__}: {name}"
    number = checked_integer(getattr(rule, name), what, least=least, error=LayoutError)
    object.__setattr__(rule, name, number)


def require_name(rule: Rule, name: str) -> None:
    """Raises LayoutError unless the field is a string that isn't empty."""
    value = getattr(rule, name)
    if not isinstance(value, str) or not value:
        raise LayoutError(
            f"{type(rule).__name__}: {name} must be a string that isn't empty, not {shown(value)}"
        )
