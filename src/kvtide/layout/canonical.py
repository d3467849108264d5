"""The canonical form of a geometry: as JSON, hashed, and compared line by line. Pure.

    {"version": 1, "first_layer": 0, "rank": 0,
     "groups": [[{"rule": "mapped", "name": "full_to_window"}]],
     "planes": [{"name": "k", "dtype": "bfloat16", "group": 0, "unit": "token",
                 "layers": [["layer", 4]], "row": [["head", 8], ["head_dim", 128]]}]}

It says what a token owns and in which order the bytes lie, and nothing of how a pool holds them.
`unit` says what a row belongs to: a token, a page or a request. `layers` are the axes that repeat
the plane, and `row` are the axes of a row, both outermost first. An axis has a name (if none, then
its size as text) and a length; if its layers aren't 0 to n - 1, their numbers stand in place of the
length. `group` is the place of the plane's row rules in `groups`: the planes of a group take the
same rows of a request.

Axes keep their names, so that a conversion between two forms of the same content (another order
of heads, another number of tensor-parallel ranks) can be derived from the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvtide.errors import LayoutError
from kvtide.integers import integer_of, shown

FORM_VERSION = 1
"""The version of the forms that this kvtide writes and reads. A change of what a form means must
count it up."""


def canonical_json(form: Any) -> str:
    """The single JSON text of a value: with sorted keys, without spaces, in ASCII."""
    return json.dumps(
        form, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def fingerprint_of(canonical: str) -> bytes:
    """16 bytes that stand for a canonical JSON text: BLAKE2b (RFC 7693) of its ASCII bytes."""
    return hashlib.blake2b(canonical.encode("ascii"), digest_size=16).digest()


# ---- reading what somebody else wrote -------------------------------------------------------


def checked_object(
    form: object,
    keys: Collection[str],
    what: str,
    *,
    optional: Collection[str] = (),
    others: bool = False,
) -> dict[str, Any]:
    """Returns `form` if it is an object with all of `keys`; else raises LayoutError.

    It may have keys of `optional`, and any other keys if `others` is true. `what` names the object
    in the error.
    """
    if not isinstance(form, dict) or not all(isinstance(key, str) for key in form):
        raise LayoutError(
            f"{what} must be an object with the keys {sorted(keys)}, not {shown(form)}"
        )
    missing, extra = sorted(set(keys) - set(form)), sorted(set(form) - {*keys, *optional})
    if missing or (extra and not others):
        raise LayoutError(
            f"{what} must have the keys {sorted(keys)}; missing are {shown(missing)}, not known "
            f"are {shown(extra)}"
        )
    return form


def checked_list(form: object, what: str, most: int | None = None) -> list[Any]:
    """`form` if it is a list, of `most` items at most; LayoutError for anything else."""
    if not isinstance(form, list):
        raise LayoutError(f"{what} must be a list, not {shown(form)}")
    if most is not None and len(form) > most:
        raise LayoutError(f"{what} must be a list of {most} items at most, not of {len(form)}")
    return form


def checked_text(form: object, what: str) -> str:
    """`form` if it is a string that isn't empty; LayoutError for anything else."""
    if not isinstance(form, str) or not form:
        raise LayoutError(f"{what} must be a string that isn't empty, not {shown(form)}")
    return form


def require_version(form: object) -> None:
    """Raises LayoutError if a geometry's form has a version that this kvtide doesn't know."""
    version = form.get("version") if isinstance(form, dict) else None
    if integer_of(version) != FORM_VERSION:
        raise LayoutError(
            f"a geometry's form has version {shown(version)}, this kvtide reads version "
            f"{FORM_VERSION}; use the kvtide that wrote it"
        )


# ---- comparing ------------------------------------------------------------------------------


Form = Mapping[str, Any]


def differences(ours: object, theirs: object) -> list[str]:
    """The differences of two geometries' forms (`Geometry.to_dict`), a line for each.

    `ours` is called "here" and `theirs` "there". Never raises, whatever JSON they are. If a
    difference has no name here, the only line says that something differs.
    """
    ours, theirs = _object(ours), _object(theirs)
    lines = [
        _line(key.replace("_", " "), ours.get(key), theirs.get(key))
        for key in ("version", "first_layer", "rank")
        if _differ(ours.get(key), theirs.get(key))
    ]
    our_planes, their_planes = _planes(ours), _planes(theirs)
    lines += [f"plane {shown(name)} only here" for name in our_planes if name not in their_planes]
    lines += [f"plane {shown(name)} only there" for name in their_planes if name not in our_planes]
    for name, plane in our_planes.items():
        if name in their_planes:
            found = _plane_differences(ours, plane, theirs, their_planes[name])
            lines += [f"plane {shown(name)}: {line}" for line in found]
    if not lines and [*our_planes] != [*their_planes]:
        lines = [_line("planes in the order", [*our_planes], [*their_planes])]
    if not lines and _differ(ours, theirs):
        lines = ["the forms differ in something that has no name here"]
    return lines


def _plane_differences(ours: Form, plane: Form, theirs: Form, other: Form) -> Iterator[str]:
    for key, label in (("dtype", "dtype"), ("unit", "one row for each")):
        if _differ(plane.get(key), other.get(key)):
            yield _line(label, plane.get(key), other.get(key))
    for key, label in (("layers", "axes of layers"), ("row", "axes of a row")):
        yield from _axis_differences(label, plane.get(key), other.get(key))
    rules = _rules(ours, plane), _rules(theirs, other)
    if _differ(*rules):
        yield _line("rows by", *(_rules_in_words(chain) for chain in rules))
    elif _differ(plane.get("group"), other.get("group")):
        yield _line("group of planes", plane.get("group"), other.get("group"))


def _axis_differences(label: str, ours: object, theirs: object) -> Iterator[str]:
    """The axes of another length, or all axes where their names or their order differ."""
    axes = _axes(ours), _axes(theirs)
    names = [[name for name, _ in some] for some in axes]
    if names[0] == names[1]:
        for (name, size), (_, other) in zip(*axes, strict=True):
            if _differ(size, other):
                yield _line(str(name), size, other)
    else:
        yield _line(label, *(" ".join(map(str, some)) or "none" for some in names))


def _line(label: str, ours: object, theirs: object) -> str:
    return f"{label} {_value(ours)} here, {_value(theirs)} there"


def _value(value: object) -> str:
    return value if isinstance(value, str) and len(value) < 120 else shown(value)


def _differ(ours: object, theirs: object) -> bool:
    """Whether two values are written differently: 1, 1.0 and true are three values."""
    try:
        return canonical_json(ours) != canonical_json(theirs)
    except (TypeError, ValueError, RecursionError):  # no JSON, or too deep to be one of ours
        return True


def _object(form: object) -> Form:
    return form if isinstance(form, dict) else {}


def _list(form: object) -> list[Any]:
    return form if isinstance(form, list) else []


def _planes(form: Form) -> dict[str, Form]:
    planes = [_object(plane) for plane in _list(form.get("planes"))]
    return {plane["name"]: plane for plane in planes if isinstance(plane.get("name"), str)}


def _axes(form: object) -> list[tuple[object, object]]:
    return [(axis[0], axis[1]) for axis in map(_list, _list(form)) if len(axis) == 2]


def _rules(form: Form, plane: Form) -> list[Any]:
    """The rules of a plane's group; none where the form has no such group."""
    groups, group = _list(form.get("groups")), integer_of(plane.get("group"))
    return _list(groups[group]) if group is not None and 0 <= group < len(groups) else []


def _rules_in_words(rules: list[Any]) -> str:
    words = []
    for rule in map(_object, rules):
        values = [f"{key}={shown(value)}" for key, value in rule.items() if key != "rule"]
        words.append(f"{shown(rule.get('rule')).strip(chr(39))}({', '.join(values)})")
    return ", then ".join(words) or "every_token()"
