"""Looks into folders of a disk tier: each file's state, and what may be removed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from kvtide.errors import SnapshotDamaged, SnapshotMiss, UsageError
from kvtide.seal import Seal, Span
from kvtide.tier import DiskTier
from kvtide.tier.file_check import check_file, read_chunks, read_seal
from kvtide.tier.inspection import inspect_folder, is_in_use, locked, remove_files
from kvtide.tier.names import name_of

CHUNKS = (bytes(range(256)) * 20, b"kvtide" * 100)


def put(tier: DiskTier, key: str) -> None:
    """Puts a snapshot of two chunks, neither of which fills its pages."""
    spans = [Span(0, 0, 4000, 0), Span(0, 4000, len(CHUNKS[0]), 0), Span(1, 0, len(CHUNKS[1]), 0)]
    sealed = tuple(
        span._replace(checksum=xxhash.xxh3_64_intdigest(CHUNKS[span.chunk][span.first : span.stop]))
        for span in spans
    )
    seal = Seal('{"groups":[]}', "sealed", 3, (), (), 8192, sealed)
    tier.put(key, seal, [memoryview(chunk) for chunk in CHUNKS])


def path_of(folder: Path, key: str) -> Path:
    """The file of a key."""
    return folder / name_of(key)[:2] / f"{name_of(key)}.safetensors"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier with the snapshots a and b."""
    with closing(DiskTier(tmp_path / "kv", limit_bytes=1 << 20)) as tier:
        for key in "ab":
            put(tier, key)
        yield tier


@pytest.fixture
def folder(tier: DiskTier, tmp_path: Path) -> Path:
    """The tier's folder, with a file of each state."""
    folder, shard = tmp_path / "kv", path_of(tmp_path / "kv", "a").parent
    damaged = path_of(folder, "b")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    put(tier, "aside")
    path_of(folder, "aside").write_bytes(b"short")
    with pytest.raises(SnapshotDamaged):
        tier.get("aside", lambda seal: [])
    path_of(folder, "another").parent.mkdir(exist_ok=True)
    path_of(folder, "another").write_bytes(path_of(folder, "a").read_bytes())
    (shard / f".{'0' * 32}.{'1' * 16}.part").write_bytes(b"12")
    (folder / "notes.txt").write_text("mine")
    (folder / "link").symlink_to("notes.txt")
    (folder / "mine").mkdir()
    os.mkfifo(shard / "pipe")
    return folder


def states_of(folder: Path) -> dict[str, str]:
    """The state of each path."""
    return {found.path: found.state for found in inspect_folder(folder)}


def test_each_file_has_its_state(folder: Path) -> None:
    """Nothing is left out but the lock; a file of another key is damaged."""
    shard = path_of(folder, "a").parent.name
    (aside,) = (folder / "damaged").iterdir()
    expected = {
        str(path_of(folder, "a").relative_to(folder)): "whole",
        str(path_of(folder, "b").relative_to(folder)): "damaged",
        str(path_of(folder, "another").relative_to(folder)): "damaged",
        f"damaged/{aside.name}": "damaged",
        f"{shard}/.{'0' * 32}.{'1' * 16}.part": "orphan",
        "notes.txt": "foreign",
        "link": "foreign",
        "mine": "foreign",
        f"{shard}/pipe": "foreign",
    }
    assert expected == states_of(folder)


def test_whole_file_is_described(folder: Path) -> None:
    """Its key, its tokens and its size are those of the snapshot."""
    (whole,) = (found for found in inspect_folder(folder) if found.state == "whole")
    assert ("a", 3, path_of(folder, "a").stat().st_size) == (
        whole.key, whole.token_count, whole.size_bytes
    )  # fmt: skip


def test_removes_files_and_no_folders(tier: DiskTier, folder: Path) -> None:
    """What was asked for goes, also a link but not its target; a folder stays."""
    tier.close()
    with locked(folder):
        found = [file for file in inspect_folder(folder) if file.state != "whole"]
        removed = remove_files(folder, found)
    assert {"mine"} == {file.path for file in found} - {file.path for file in removed}
    assert ["mine", "whole"] == sorted(
        path if state == "foreign" else state for path, state in states_of(folder).items()
    )


def test_lock_is_needed_to_remove_alone(tier: DiskTier, folder: Path) -> None:
    """A tier in use is seen, and locks the folder; a closed one doesn't."""
    assert is_in_use(folder)
    with pytest.raises(UsageError, match="another process uses"), locked(folder):
        pass
    tier.close()
    assert not is_in_use(folder)
    with locked(folder):
        assert is_in_use(folder)


@pytest.mark.parametrize("kind", ["nothing", "no lock", "another lock", "a linked lock", "a file"])
def test_folder_of_no_tier_is_refused(tmp_path: Path, kind: str) -> None:
    """So nobody's documents are taken for foreign files."""
    path = tmp_path / "documents"
    if kind == "a file":
        path.touch()
    elif kind != "nothing":
        path.mkdir()
    if kind == "another lock":
        (path / "kvtide.lock").write_text("{}")
    if kind == "a linked lock":
        DiskTier(tmp_path / "tier", limit_bytes=0).close()
        (path / "kvtide.lock").symlink_to(tmp_path / "tier" / "kvtide.lock")
    with pytest.raises(UsageError, match="is no folder of a disk tier"):
        is_in_use(path)


# ---- every byte ----------------------------------------------------------------------------------


def both_ways(file: int) -> None:
    """Reads a file in little memory, and as a tier does; both must find damage."""
    with pytest.raises((SnapshotDamaged, SnapshotMiss)):
        check_file(file, name_of("a"))
    rooms = [memoryview(bytearray(len(chunk))) for chunk in CHUNKS]

    def read() -> None:
        _, seal, form = read_seal(file, "a")
        read_chunks(file, form, seal, rooms)

    with pytest.raises((SnapshotDamaged, SnapshotMiss)):
        read()


def test_every_flipped_byte_and_every_length_is_found(tier: DiskTier, tmp_path: Path) -> None:
    """No byte of a file goes unchecked: neither header, nor chunk, nor the zeros between."""
    path = path_of(tmp_path / "kv", "a")
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as stream:
        file = stream.fileno()
        check_file(file, name_of("a"))
        for place, value in enumerate(content):
            os.pwrite(file, bytes([value ^ 1 << place % 8]), place)
            both_ways(file)
            os.pwrite(file, bytes([value]), place)
        check_file(file, name_of("a"))
        os.pwrite(file, b"\0", len(content))
        both_ways(file)
        for length in reversed(range(len(content))):
            os.truncate(file, length)
            both_ways(file)


@pytest.mark.parametrize("group_bytes", [1, 6000, 1 << 20])
def test_chunks_are_checked_in_groups_of_any_size(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    """A whole file is read, and a wrong byte in any chunk or gap is found."""
    monkeypatch.setattr("kvtide.tier.file_check._GROUP_BYTES", group_bytes)
    path = path_of(tmp_path / "kv", "a")
    rooms = [memoryview(bytearray(len(chunk))) for chunk in CHUNKS]
    with path.open("r+b", buffering=0) as stream:
        file = stream.fileno()
        _, seal, form = read_seal(file, "a")
        read_chunks(file, form, seal, rooms)
        assert CHUNKS == tuple(map(bytes, rooms))
        for number, offset in enumerate(form.offsets):
            for place in (offset, offset + len(CHUNKS[number])):
                (value,) = os.pread(file, 1, place)
                os.pwrite(file, bytes([value ^ 1]), place)
                with pytest.raises(SnapshotDamaged):
                    read_chunks(file, form, seal, rooms)
                os.pwrite(file, bytes([value]), place)
        with pytest.raises(SnapshotDamaged, match="1 chunks were asked for, it has 2"):
            read_chunks(file, form, seal, rooms[:1])


def test_a_failed_read_ends_after_the_check_of_what_was_read_before(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the memory is in use, so nobody else may get it."""
    failed, checked = threading.Event(), list[int]()

    def read(*arguments: object) -> None:
        if arguments[-1] == [rooms[1]]:
            failed.set()
            raise OSError(errno.EIO, "gone")

    def check(*_: object) -> None:
        failed.wait(10)
        time.sleep(0.05)
        checked.append(1)

    monkeypatch.setattr("kvtide.tier.file_check._GROUP_BYTES", 1)
    monkeypatch.setattr("kvtide.tier.file_check._read_group", read)
    monkeypatch.setattr("kvtide.tier.file_check._check_spans", check)
    rooms = [memoryview(bytearray(len(chunk))) for chunk in CHUNKS]
    with path_of(tmp_path / "kv", "a").open("r+b", buffering=0) as stream:
        _, seal, form = read_seal(stream.fileno(), "a")
        with pytest.raises(OSError, match="gone"):
            read_chunks(stream.fileno(), form, seal, rooms)
    assert [1] == checked
