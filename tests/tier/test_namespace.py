"""Tests of the keys that a namespace makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import SnapshotMiss, UsageError
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.tide import Tide
from kvtide.tier import DiskTier, MooncakeTier, Namespace
from kvtide.tier.namespace import is_shared, salt_of
from tier.fake_mooncake import FakeStore

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


SEPARATORS = ["", ",", '","', '", "', ", ", "/", ":", "\0", "\n", "]", '\\"']


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("place", range(len(FIELDS) - 1))
def test_text_that_moves_to_the_next_field_changes_a_key(place: int, separator: str) -> None:
    """The name comes after the last field. Texts that were only joined would be equal."""

    def key_of(first: str, second: str) -> str:
        parts = ["x"] * len(FIELDS)
        parts[place : place + 2] = first, second
        *values, name = parts
        texts: dict[str, Any] = dict(zip(FIELDS[:-1], values, strict=True))
        return Namespace(**texts).key_of(name)

    assert key_of(f"a{separator}b", "c") != key_of("a", f"b{separator}c")


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


@pytest.mark.parametrize("name", FIELDS)
def test_no_error_shows_a_salt(name: str) -> None:
    """Errors end in logs."""
    with pytest.raises(UsageError) as error:
        replace(SPACE, **{name: 7})  # type: ignore[arg-type]
    assert "secret" not in f"{error.value!r} {error.value}"


def test_an_operator_sets_the_salt_in_the_environment() -> None:
    """Any bytes, as a shell gives them; without the variable there is no secret."""
    assert b"a\xff" == salt_of({"KVTIDE_SALT": "a\udcff"})
    assert b"" == salt_of({})


# ---- tenants ------------------------------------------------------------------------------------


@pytest.fixture
def tide() -> Iterator[Tide]:
    """A pool of 64 tokens of 128 bytes."""
    with closing(CPUDevice(lanes=1)) as device:
        geometry = GQA.bind(dtype="bfloat16", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        pool = Pool.create(geometry, device, page_count=16)
        yield Tide(pool, HostArena(device, limit_bytes=1 << 20, block_bytes=64 * 128))


@pytest.fixture(params=["disk", "mooncake"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A tier that two tenants share, and a function that gives all that it has stored."""
    if request.param == "disk":
        with closing(DiskTier(tmp_path, limit_bytes=1 << 20)) as disk:
            files = (path for path in tmp_path.rglob("*") if path.is_file())
            yield disk, lambda: b"".join(str(path).encode() + path.read_bytes() for path in files)
    else:
        store = FakeStore()
        with closing(MooncakeTier("", open_client=store.open_client)) as mooncake:
            objects = store.objects
            yield mooncake, lambda: b"".join(name.encode() + objects[name] for name in objects)


def test_tenants_neither_read_nor_remove_nor_probe_each_others_kv(
    shared: tuple[Any, Any], tide: Tide
) -> None:
    """Two tenants with the same model and the same prompt, and each with a secret."""
    tier, stored = shared
    ours, theirs = (replace(SPACE, salt=salt).key_of("prompt") for salt in (b"sesame", b"barley"))
    snapshots = []
    for value in (1, 2):
        for buffer in tide.pool.buffers:
            buffer.fill_(value)
        snapshots.append(tide.offload(range(64)))
    tier.save(ours, snapshots[0])
    assert not tier.contains(theirs)
    with pytest.raises(SnapshotMiss):
        tier.load(theirs, tide.arena)
    tier.remove(theirs)
    assert tier.contains(ours)
    tier.save(theirs, snapshots[1])
    content = stored()
    assert not any(text in content for text in (b"sesame", b"barley", b"prompt"))
    tier.remove(theirs)
    loaded = tier.load(ours, tide.arena)
    assert {1} == set(b"".join(loaded.chunks))
    for snapshot in (loaded, *snapshots):
        tide.discard(snapshot)


def test_a_shared_key_is_told_from_others() -> None:
    """It is the same key with a beginning that says so; other texts aren't taken for one."""
    assert SPACE.shared_key_of("a") == f"shared/{SPACE.key_of('a')}"
    assert [True, False, False] == [
        is_shared(key) for key in (SPACE.shared_key_of("a"), SPACE.key_of("a"), "a shared/b")
    ]
