"""Tests of the keys that a namespace makes."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.tier import Namespace

SPACE = Namespace(model="m", weights="w", layout="00ff", salt=b"secret")
FIELDS = [about.name for about in fields(Namespace)]


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_decides_both_halves_of_a_key(name: str) -> None:
    """Another value of any field gives another namespace and another key."""
    value: Any = b"other" if name == "salt" else "other"
    ours, theirs = SPACE.key_of("tokens"), replace(SPACE, **{name: value}).key_of("tokens")
    assert all(a != b for a, b in zip(ours.split("/"), theirs.split("/"), strict=True))


def test_key_of_another_name_differs_in_its_second_half() -> None:
    """The first half is the namespace's."""
    space, name = SPACE.key_of("a").split("/")
    assert SPACE.key_of("a") == f"{space}/{name}"
    assert SPACE.key_of("b").split("/")[0] == space
    assert SPACE.key_of("b").split("/")[1] != name
    assert re.fullmatch("[0-9a-f]{32}/[0-9a-f]{32}", SPACE.key_of("a"))


def test_text_that_moves_from_field_to_field_is_another_namespace() -> None:
    """A hash of the fields' texts one after another would not see where a field ends."""
    ours = replace(SPACE, model='a","b', weights="c")
    assert ours.key_of("x") != replace(SPACE, model="a", weights='b","c').key_of("x")
    assert replace(SPACE, stage="0", rank="").key_of("x") != (
        replace(SPACE, stage="", rank="0").key_of("x")
    )
    assert replace(SPACE, adapter="x").key_of("") != replace(SPACE, adapter="").key_of("x")


def test_what_is_not_valid_unicode_has_a_key_too() -> None:
    """File names may have such text."""
    assert replace(SPACE, model="\udcff").key_of("\udcfe") != SPACE.key_of("\udcfe")


def test_a_salt_is_not_shown() -> None:
    """It is the tenant's secret."""
    assert "secret" not in repr(SPACE)


def test_field_of_another_type_is_refused() -> None:
    """A number would have the same JSON as no text, but another hash than a user expects."""
    with pytest.raises(UsageError, match="rank must be str"):
        replace(SPACE, rank=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="salt must be bytes"):
        replace(SPACE, salt="text")  # type: ignore[arg-type]
