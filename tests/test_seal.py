from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import KvtideError, SnapshotDamaged, SnapshotMiss
from kvtide.layout import canonical_json
from kvtide.seal import Seal, Span, ranges_of
from support.pools import small_geometry


def a_geometry(group_count: int) -> str:
    """Makes a geometry of `group_count` groups, with all that a seal reads of it."""
    form = small_geometry().to_dict()
    return canonical_json(form | {"groups": [[] for _ in range(group_count)]})


CHUNKS = (bytes(range(100)), bytes(range(100, 200)), b"the last one is shorter")
STOPS = ((0, 0, 60), (0, 60, 100), (1, 0, 100), (2, 0, 10), (2, 10, len(CHUNKS[2])))


def a_seal(**changes: Any) -> Seal:
    """Makes a seal of CHUNKS in five spans."""
    seal = Seal(
        geometry=a_geometry(2),
        key="model, request 7",
        token_count=9,
        tokens=((range(9),), (range(1, 4), range(4, 9, 2))),
        lasts=((), (range(1, 4), range(4, 9, 2))),
        chunk_bytes=100,
        spans=tuple(
            Span(chunk, first, stop, xxhash.xxh3_64_intdigest(CHUNKS[chunk][first:stop]))
            for chunk, first, stop in STOPS
        ),
    )
    return replace(seal, **changes)


def resealed(form: dict[str, Any]) -> str:
    """Gives a form the checksum that it should have, as an attacker could."""
    form = {name: value for name, value in form.items() if name != "checksum"}
    checksum = xxhash.xxh3_64_intdigest(canonical_json(form).encode())
    return json.dumps(form | {"checksum": f"{checksum:016x}"})


def test_intact_bytes_are_accepted() -> None:
    """Bytes after a chunk's used bytes don't matter."""
    a_seal().check_bytes(CHUNKS)
    a_seal().check_bytes([memoryview(chunk + b"?") for chunk in CHUNKS])
    assert (100, 100, len(CHUNKS[2])) == a_seal().used_bytes


def test_every_flipped_bit_is_damage() -> None:
    """The damage is found without a pool and a device, and the error names the chunk."""
    seal, flips = a_seal(), 0
    for number, chunk in enumerate(CHUNKS):
        for bit in range(8 * len(chunk)):
            changed = bytearray(chunk)
            changed[bit // 8] ^= 1 << bit % 8
            chunks = [*CHUNKS[:number], bytes(changed), *CHUNKS[number + 1 :]]
            with pytest.raises(SnapshotDamaged, match=f"^chunk {number}: "):
                seal.check_bytes(chunks)
            flips += 1
    assert 8 * sum(map(len, CHUNKS)) == flips


@pytest.mark.parametrize(
    "chunks", [CHUNKS[:2], (*CHUNKS, b""), (CHUNKS[0], CHUNKS[1], CHUNKS[2][:-1]), ()]
)
def test_a_short_read_is_damage(chunks: tuple[bytes, ...]) -> None:
    """Bytes or whole chunks are missing, or there are too many."""
    with pytest.raises(SnapshotDamaged):
        a_seal().check_bytes(chunks)


def test_the_length_of_a_span_is_checked_too() -> None:
    """An attacker could write the checksum of a shorter chunk."""
    span = Span(0, 0, 100, xxhash.xxh3_64_intdigest(CHUNKS[0][:50]))
    with pytest.raises(SnapshotDamaged, match=r"50 bytes.*sealed as 100"):
        span.check(CHUNKS[0][:50])


def test_bytes_are_checked_without_torch(tmp_path: Path) -> None:
    """A process needs only the seal's JSON and the bytes."""
    (tmp_path / "seal").write_text(a_seal().to_json())
    for number, chunk in enumerate(CHUNKS):
        (tmp_path / str(number)).write_bytes(chunk)
    program = (
        "import sys; from pathlib import Path; from kvtide.seal import Seal\n"
        "folder = Path(sys.argv[1]); seal = Seal.from_json((folder / 'seal').read_bytes())\n"
        "seal.check_bytes([(folder / str(n)).read_bytes() for n in range(len(seal.used_bytes))])\n"
        "print('whole', 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    whole = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "whole False\n" == whole.stdout
    (tmp_path / "1").write_bytes(CHUNKS[1][:-1] + b"!")
    damaged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (1, True) == (damaged.returncode, "SnapshotDamaged: chunk 1" in damaged.stderr)


@given(
    st.text(max_size=9),
    st.lists(st.lists(st.integers(0, 50), unique=True, max_size=12).map(sorted), max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.data(),
)
def test_a_seal_comes_back_from_json(
    key: str, groups: list[list[int]], sizes: list[int], data: st.DataObject
) -> None:
    """This holds for any content, and equal seals have equal JSON."""
    spans: list[Span] = []
    for chunk, size in enumerate(sizes):
        stops = sorted({size, *data.draw(st.lists(st.integers(1, size), max_size=3))})
        for first, stop in zip((0, *stops), stops, strict=False):
            spans.append(Span(chunk, first, stop, data.draw(st.integers(0, 2**64 - 1))))
    tokens = tuple(ranges_of(np.array(group, np.int64)) for group in groups)
    seal = a_seal(
        geometry=a_geometry(len(groups)),
        key=key,
        tokens=tokens,
        lasts=tokens,
        token_count=51,
        chunk_bytes=9,
        spans=tuple(spans),
    )
    assert seal == Seal.from_json(seal.to_json())
    assert seal == Seal.from_json(seal.to_json().encode())
    assert seal.to_json() == Seal.from_json(seal.to_json()).to_json()
    assert groups == [seal.tokens_of(group).tolist() for group in range(len(groups))]
    assert tuple(sizes) == seal.used_bytes


def test_every_changed_character_of_the_json_is_found() -> None:
    """Each character is replaced, left out or doubled: an error is raised, or the seal is equal."""
    text, seal = a_seal().to_json(), a_seal()
    for place, character in enumerate(text):
        for other in ("", character * 2, "0" if character != "0" else "1", '"', "é"):
            try:
                found = Seal.from_json(text[:place] + other + text[place + 1 :])
            except (SnapshotDamaged, SnapshotMiss):
                continue
            assert seal == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "isn't JSON"),
        ("[" * 100_000, "isn't JSON"),
        ("9" * 10_000, "isn't JSON"),
        ('{"form": 1, "key": NaN}', "isn't JSON"),
        ('{"form": 1, "key": 1e999}', "isn't JSON"),
        (b"\xff\xfe", "isn't JSON"),
        ("[]", "not an object"),
        ("null", "not an object"),
    ],
)
def test_a_text_that_is_no_seal_is_damaged(text: str | bytes, message: str) -> None:
    """The error is the same, whatever is wrong with the text."""
    with pytest.raises(SnapshotDamaged, match=f"{message}.*recompute this request"):
        Seal.from_json(text)


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [1]])
def test_another_version_is_a_miss(version: object) -> None:
    """It isn't damaged, since another kvtide reads it."""
    form = json.loads(a_seal().to_json()) | {"form": version}
    with pytest.raises(SnapshotMiss, match=r"form version .*reads 1.*wrote it"):
        Seal.from_json(resealed(form))


DEEP = json.loads("[" * 500 + "]" * 500)
HOSTILE: dict[tuple[str | int, ...], list[Any]] = {
    ("more",): [1],
    ("key",): [7, None],
    ("geometry",): [[], None, {}, {"groups": 1}],
    ("geometry", "groups"): [[], [[]], [[]] * 3, {}],
    ("geometry", "planes"): [DEEP],
    ("token_count",): [-1, 2**63, 1.0, True, "9", None, 3],
    ("chunk_bytes",): [-1, 0, 99, True, "100"],
    ("tokens",): [7, {}, [7], [[7]], [[[0, 9]]], [[[0, 9, 1, 1]]]],
    ("tokens", 0, 0): [[0, 9, 0], [5, 5, 1], [9, 0, 1], [0, 10, 1], [-1, 9, 1], [0, 9, -1],
                       [0, True, 1], [0, 2.5, 1]],
    ("tokens", 1, 1): [[3, 9, 2], [4, 7, 2]],
    ("lasts",): [[], [[]], [[], [], []]],
    ("lasts", 0): [[[8, 9, 1]]],
    ("spans",): [7, {}, [7], [[0, 0, 60]], "spans", [[0, 0, 0, "0" * 16]],
                 [[1, 0, 100, "0" * 16]]],
    ("spans", 0, 0): [1, 2],
    ("spans", 0, 1): [1, -1, True, 2**70],
    ("spans", 0, 2): [0, 59, 61, 101],
    ("spans", 0, 3): [7, "12", "g" * 16, "A" * 16, None],
    ("spans", 2, 0): [0, 2],
    ("spans", 4, 2): [101],
}  # fmt: skip
"""Invalid values of a field, by the path to it."""


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in HOSTILE.items() for value in values]
)
def test_a_hostile_seal_is_damaged(path: tuple[str | int, ...], value: object) -> None:
    """The seal's checksum is right, but its content is impossible."""
    form = json.loads(a_seal().to_json())
    holder = form
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    with pytest.raises(SnapshotDamaged, match="seal is damaged"):
        Seal.from_json(resealed(form))


@pytest.mark.parametrize("name", [*json.loads(a_seal().to_json())])
def test_no_field_may_be_missing(name: str) -> None:
    """Every field is needed."""
    form = json.loads(a_seal().to_json())
    del form[name]
    with pytest.raises((SnapshotDamaged, SnapshotMiss)):
        Seal.from_json(json.dumps(form) if name == "checksum" else resealed(form))


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda leaf: st.lists(leaf, max_size=4), max_leaves=6), st.data())
def test_any_value_in_any_place_is_refused_or_consistent(
    value: object, data: st.DataObject
) -> None:
    """No other error is raised, and a form that is read is consistent."""
    form = json.loads(a_seal().to_json())
    name = data.draw(st.sampled_from(sorted(form)))
    if isinstance(form[name], list) and data.draw(st.booleans()):
        form[name][data.draw(st.integers(0, len(form[name]) - 1))] = value
    else:
        form[name] = value
    try:
        seal = Seal.from_json(resealed(form))
    except KvtideError:
        return
    assert seal == Seal.from_json(seal.to_json())
    assert all(used <= seal.chunk_bytes for used in seal.used_bytes)


def test_chunks_of_other_sizes_are_a_miss() -> None:
    """Bytes without a span would be restored unchecked."""
    seal = a_seal()
    seal.check_coverage([100, 100, len(CHUNKS[2])])
    for sizes, chunk, sealed, there in (
        ([100, 100], 2, 23, 0), ([100, 100, 22], 2, 23, 22), ([100, 100, 24], 2, 23, 24),
        ([100, 100, 23, 1], 3, 0, 1), ([], 0, 100, 0),
        ([100, 23, 100], 1, 100, 23),
    ):  # fmt: skip
        message = f"sealed with {sealed} bytes in chunk {chunk}, the target has {there} there"
        with pytest.raises(SnapshotMiss, match=message):
            seal.check_coverage(sizes)


def test_the_sizes_of_chunks_are_compared_one_by_one() -> None:
    """A seal that states chunks of one byte can't make its reader build a list of them."""
    sizes = chain([100, 100, 23], repeat(1, 99))
    with pytest.raises(SnapshotMiss, match="in chunk 3"):
        a_seal().check_coverage(sizes)
    assert 98 == len([*sizes])


def test_a_seal_of_no_tokens_comes_back() -> None:
    """A row of the request itself counts as token 0, though the request has no tokens."""
    seal = a_seal(token_count=0, tokens=((range(1),), ()), lasts=((), ()))
    assert seal == Seal.from_json(seal.to_json())
