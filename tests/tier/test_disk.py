from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open

from kvtide.arena import HostArena
from kvtide.conformance import TierTests
from kvtide.device import CPUDevice
from kvtide.errors import (
    ArenaFull,
    LayoutError,
    ProcessForked,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
    UsageError,
)
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.seal import Seal, Span
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import DiskTier, Spill, Tier
from kvtide.tier import disk as disk_module
from kvtide.tier.file_form import file_form_of
from kvtide.tier.names import name_of
from support.interrupts import every_interrupt

FILE_BYTES = 4096 + 8192
"""The file of 40 tokens of `tide`: its header, and 40 rows of 128 bytes."""


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens a tier on the test's folder."""
    opened: list[DiskTier] = []

    def open_tier(*, limit_bytes: Any = 8 << 20, keeps_used: bool = False) -> DiskTier:
        opened.append(DiskTier(tmp_path / "tier", limit_bytes=limit_bytes, keeps_used=keeps_used))
        return opened[-1]

    yield open_tier
    for disk in opened:
        disk.close()


@pytest.fixture
def tide() -> Iterator[Tide]:
    """A pool of 256 tokens of 128 bytes, and an arena whose blocks hold 64 of them."""
    with closing(CPUDevice(lanes=1)) as device:
        geometry = GQA.bind(dtype="bfloat16", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        pool = Pool.create(geometry, device, page_count=64)
        for number, buffer in enumerate(pool.buffers):
            buffer.fill_(number + 65)
        yield Tide(pool, HostArena(device, limit_bytes=1 << 20, block_bytes=64 * 128))


def save(tier: DiskTier, tide: Tide, key: str, count: int = 40) -> None:
    """Puts a snapshot of the first slots; nothing is left in the arena."""
    snapshot = tide.offload(range(count), key=key)
    try:
        tier.save(key, snapshot)
    finally:
        tide.discard(snapshot)


def path_of(tier: DiskTier, key: str) -> Path:
    """The file of a key."""
    name = name_of(key)
    return tier._folder.path / name[:2] / f"{name}.safetensors"


class TestDiskTier(TierTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "tier"
        # Ten thousand files are written here, and none has to outlive a power cut.
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, lambda descriptor: None)
        monkeypatch.setattr("kvtide.tier.folder.takes_direct_io", lambda *_: False)

    def make_tier(self) -> DiskTier:
        return DiskTier(self.folder, limit_bytes=8 << 20)

    def close_tier(self, tier: Tier) -> None:
        assert isinstance(tier, DiskTier)
        tier.close()

    def _path(self) -> Path:
        (path,) = self.folder.glob("??/*.safetensors")
        return path

    def stored_bytes(self, tier: Tier, key: str) -> int:
        return self._path().stat().st_size

    def set_stored(self, tier: Tier, key: str, place: int, flip: int) -> None:
        with self._path().open("r+b") as file:
            file.seek(place)
            if not flip:
                file.truncate()
                return
            value = file.read(1)[0]
            file.seek(place)
            file.write(bytes([value ^ flip]))


# ---- the limit ----------------------------------------------------------------------------------


def test_least_recently_used_leaves_first(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """A read counts as a use; the limit is kept at every moment."""
    small = tier(limit_bytes=3 * FILE_BYTES)
    for key in "abc":
        save(small, tide, key)
    small.load("a", tide.arena).lease.release()
    save(small, tide, "d")
    assert [True, False, True, True] == [small.contains(key) for key in "abcd"]
    assert (3, 3 * FILE_BYTES, 1) == (
        small.stats.snapshots, small.stats.used_bytes, small.stats.evicted
    )  # fmt: skip


def test_used_bytes_are_what_the_files_take(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """The books agree with the folder, after replacing and removing too."""
    disk = tier()
    for key, count in (("a", 40), ("b", 10), ("a", 200), ("c", 0), ("b", 11)):
        save(disk, tide, key, count)
    disk.remove("c")
    files = list(disk._folder.path.glob("??/*"))
    assert 2 == len(files) == disk.stats.snapshots
    assert sum(file.stat().st_size for file in files) == disk.stats.used_bytes


def test_snapshot_larger_than_the_limit_removes_no_other(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """TierFull comes before anything is removed."""
    small = tier(limit_bytes=FILE_BYTES)
    save(small, tide, "a")
    with pytest.raises(TierFull, match=rf"of {FILE_BYTES} in use"):
        save(small, tide, "b", 200)
    assert small.contains("a")


def test_a_file_that_is_being_read_is_not_removed(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """A put finds no room while the only other file is being read, and finds it afterwards."""
    small = tier(limit_bytes=FILE_BYTES)
    save(small, tide, "a")

    def make_room(seal: Seal) -> list[memoryview]:
        with pytest.raises(TierFull):
            save(small, tide, "b")
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    small.get("a", make_room)
    save(small, tide, "b")
    assert [False, True] == [small.contains(key) for key in "ab"]


# ---- what is in use stays ------------------------------------------------------------------------


def test_what_is_in_use_stays_and_what_was_left_leaves(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """Files of earlier processes leave for others, unless they were read; those put now stay."""
    first = tier()
    for number, key in enumerate("ab"):
        save(first, tide, key)
        os.utime(path_of(first, key), (number, number))
    first.close()
    second = tier(limit_bytes=3 * FILE_BYTES, keeps_used=True)
    second.load("a", tide.arena).lease.release()
    for key in "cd":
        save(second, tide, key)
    assert [True, False, True, True] == [second.contains(key) for key in "abcd"]
    with pytest.raises(TierFull, match=f"{3 * FILE_BYTES} of {3 * FILE_BYTES} in use"):
        save(second, tide, "e")
    assert [True, True, True] == [second.contains(key) for key in "acd"]
    for key in "ac":
        second.remove(key)
        save(second, tide, key.upper())
    assert (3, 1) == (second.stats.snapshots, second.stats.evicted)


def test_what_is_in_use_can_be_replaced_and_damaged(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """A damaged file is in use no more, and leaves; a replaced one's room is free."""
    disk = tier(limit_bytes=3 * FILE_BYTES, keeps_used=True)
    for key in "aab":
        save(disk, tide, key)
    with path_of(disk, "b").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(SnapshotDamaged):
        disk.load("b", tide.arena)
    for key in "cd":
        save(disk, tide, key)
    assert not list(disk._folder.path.glob("damaged/*"))
    assert [True, False, True, True] == [disk.contains(key) for key in "abcd"]
    for key in "acd":
        disk.remove(key)
    assert (0, 0, 0) == (disk.stats.used_bytes, disk._books._busy_bytes, len(disk._books.used))


def test_what_is_shared_leaves_for_others_though_it_was_used(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """It is a cache, of this process too: what was used longest ago leaves first."""
    disk = tier(limit_bytes=3 * FILE_BYTES, keeps_used=True)
    for key in ("shared/a", "shared/b", "c"):
        save(disk, tide, key)
    disk.load("shared/a", tide.arena).lease.release()
    save(disk, tide, "d")
    assert [True, False] == [disk.contains(f"shared/{key}") for key in "ab"]
    save(disk, tide, "e")
    assert [False, True, True, True] == [disk.contains(key) for key in ("shared/a", *"cde")]
    with pytest.raises(TierFull):
        save(disk, tide, "shared/f")


def test_what_is_in_use_is_known_after_the_disk_was_away(
    tier: Callable[..., DiskTier], tide: Tide, tmp_path: Path
) -> None:
    """The books that are made anew know what must stay."""
    disk = tier(limit_bytes=2 * FILE_BYTES, keeps_used=True)
    save(disk, tide, "a")
    shutil.copytree(disk._folder.path, tmp_path / "away")
    shutil.rmtree(disk._folder.path)
    with pytest.raises(TierRetry):
        save(disk, tide, "b")
    (tmp_path / "away").rename(disk._folder.path)
    save(disk, tide, "b")
    with pytest.raises(TierFull):
        save(disk, tide, "c")
    assert [True, True] == [disk.contains(key) for key in "ab"]


# ---- the next start -----------------------------------------------------------------------------


def test_snapshots_are_found_again_at_the_next_start(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """The order of leaving is kept, and what exceeds a smaller limit leaves."""
    first = tier()
    for number, key in enumerate("abc"):
        save(first, tide, key)
        os.utime(path_of(first, key), (number, number))
    first.load("a", tide.arena).lease.release()
    first.close()
    second = tier(limit_bytes=2 * FILE_BYTES)
    assert [True, False, True] == [second.contains(key) for key in "abc"]
    assert 2 * FILE_BYTES == second.stats.used_bytes
    second.load("a", tide.arena).lease.release()


def test_orphans_are_removed_and_foreign_files_stay(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """A file without a writer goes; a file that isn't kvtide's isn't touched, nor counted."""
    first = tier()
    save(first, tide, "a")
    first.close()
    shard = path_of(first, "a").parent
    orphan = shard / f".{'a' * 32}.{'b' * 16}.part"
    foreign = [shard / "notes.txt", shard / f"{'0' * 32}.safetensors", first._folder.path / "x"]
    for path in (orphan, *foreign):
        path.write_bytes(b"12345")
    (shard / f"{shard.name}{'1' * 30}.safetensors").mkdir()
    second = tier()
    assert not orphan.exists()
    assert all(path.exists() for path in foreign)
    assert (1, FILE_BYTES) == (second.stats.snapshots, second.stats.used_bytes)


def test_folder_has_one_writer(tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    """A second process gets an error that names the folder; a later one gets the folder."""
    first = tier()
    with pytest.raises(UsageError, match="another process uses the folder"):
        tier()
    first.close()
    tier().close()
    script = (
        "import sys; from pathlib import Path; from kvtide.tier import DiskTier\n"
        "DiskTier(Path(sys.argv[1]), limit_bytes=0)\n"
    )
    third = tier()
    done = subprocess.run(
        [sys.executable, "-c", script, third._folder.path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 1 == done.returncode
    assert "another process uses the folder" in done.stderr


@pytest.mark.parametrize("bad", [-1, 1.5, "2GiB", None])
def test_invalid_limit_is_refused(tier: Callable[..., DiskTier], bad: Any) -> None:
    """The limit is an integer number of bytes."""
    with pytest.raises(LayoutError, match="disk tier: limit_bytes"):
        tier(limit_bytes=bad)


def test_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A file is refused, and so is a folder whose parent isn't there."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "no" / "parent"):
        with pytest.raises(UsageError, match="cannot use the folder"):
            DiskTier(path, limit_bytes=0)


# ---- damage and attacks -------------------------------------------------------------------------


def test_damaged_file_is_kept_aside_and_leaves_first(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """It counts, is kept for whoever looks into it over the next start, and makes room first."""
    first = tier(limit_bytes=2 * FILE_BYTES)
    for key in "ab":
        save(first, tide, key)
    path = path_of(first, "b")
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))
    with pytest.raises(SnapshotDamaged):
        first.load("b", tide.arena)
    assert (1, 2 * FILE_BYTES, 1) == (
        first.stats.snapshots, first.stats.used_bytes, first.stats.damaged
    )  # fmt: skip
    first.close()
    second = tier(limit_bytes=2 * FILE_BYTES)
    assert 1 == len(list((second._folder.path / "damaged").iterdir()))
    save(second, tide, "c")
    assert not list((second._folder.path / "damaged").iterdir())
    assert [True, False, True] == [second.contains(key) for key in "abc"]
    assert 0 == second.stats.evicted


def test_newer_file_of_a_damaged_key_stays(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """The damage of a file that was replaced meanwhile moves nothing aside."""
    disk = tier()
    save(disk, tide, "a")
    path = path_of(disk, "a")
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))

    def make_room(seal: Seal) -> list[memoryview]:
        save(disk, tide, "a")
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    with pytest.raises(SnapshotDamaged):
        disk.get("a", make_room)
    disk.load("a", tide.arena).lease.release()


def test_file_that_vanished_is_a_miss(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """It isn't in the books any more, and the key can be put again."""
    disk = tier()
    save(disk, tide, "a")
    path_of(disk, "a").unlink()
    with pytest.raises(SnapshotMiss):
        disk.load("a", tide.arena)
    assert (False, 0, 0) == (disk.contains("a"), disk.stats.snapshots, disk.stats.used_bytes)
    save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()


def test_file_of_another_key_is_damage(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """A whole file under another key's name isn't served."""
    disk = tier()
    for key in "ab":
        save(disk, tide, key)
    path_of(disk, "a").write_bytes(path_of(disk, "b").read_bytes())
    with pytest.raises(SnapshotDamaged, match="it is of the key 'b', under the name of 'a'"):
        disk.load("a", tide.arena)
    disk.load("b", tide.arena).lease.release()


def _length(size: int) -> bytes:
    return size.to_bytes(8, "little")


def _with_header(text: bytes, data: bytes = b"") -> bytes:
    content = _length(len(text)) + text + data
    return content.ljust(-(-len(content) // 4096) * 4096, b" ")


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "short": b"abc",
    "no header": bytes(4096),
    "a header of 2**64 bytes": _length(2**64 - 1).ljust(4096),
    "a header longer than the file": _length(8192).ljust(4096),
    "not JSON": _with_header(b"{"),
    "not an object": _with_header(b"[1]"),
    "deep": _with_header(b"[" * 100_000),
    "no metadata": _with_header(b"{}"),
    "no seal": _with_header(b'{"__metadata__":{}}'),
    "no key": _with_header(b'{"__metadata__":{"seal":"x"}}'),
    "a seal that is a number": _with_header(b'{"__metadata__":{"key":"a","seal":3}}'),
    "a seal that is not JSON": _with_header(b'{"__metadata__":{"key":"a","seal":"x"}}'),
    "a key that is a list": _with_header(b'{"__metadata__":{"key":["a"],"seal":"x"}}'),
    "two keys": _with_header(b'{"__metadata__":{"key":"b","key":"a","seal":"{}","seal":"x"}}'),
    "a large number": _with_header(b'{"__metadata__":{"key":"a","seal":"' + b"9" * 5000 + b'"}}'),
    "metadata that is deep": _with_header(b'{"__metadata__":' + b'{"key":' * 50_000),
    "text behind the header": _with_header(b'{"__metadata__":{}}\0\0{"a":1}'),
    "not UTF-8": _with_header(b'{"__metadata__":{"seal":"\xff"}}'),
    "NaN": _with_header(b'{"__metadata__":NaN}'),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_is_refused(tier: Callable[..., DiskTier], tide: Tide, content: bytes) -> None:
    """It asks for no memory, and is moved aside."""
    disk = tier()
    save(disk, tide, "a")
    path_of(disk, "a").write_bytes(content)
    with pytest.raises(SnapshotDamaged):
        disk.get("a", lambda seal: pytest.fail("no room is needed"))
    assert not disk.contains("a")


def _hostile_seal(*spans: Span) -> Seal:
    """A seal whose own checksum is right, as whoever knows the form can make it."""
    chunk_bytes = max(span.stop for span in spans)
    return Seal('{"groups":[]}', "", 1, (), (), chunk_bytes, spans)


HOSTILE_SEALS = {
    "too large for memory": _hostile_seal(Span(0, 0, 1 << 50, 0)),
    "larger than its file": _hostile_seal(Span(0, 0, 1 << 20, 0)),
    "smaller than its file": _hostile_seal(Span(0, 0, 1, 0)),
    "with chunks that aren't there": _hostile_seal(*(Span(n, 0, 4096, 0) for n in range(20))),
    "with bytes that no span has": _hostile_seal(Span(0, 4096, 8192, 0)),
    "with spans that overlap": _hostile_seal(Span(0, 0, 8192, 0), Span(0, 4096, 8192, 0)),
}


@pytest.mark.parametrize("seal", HOSTILE_SEALS.values(), ids=HOSTILE_SEALS.keys())
def test_hostile_seal_is_refused(tier: Callable[..., DiskTier], tide: Tide, seal: Seal) -> None:
    """A file whose header is the right one for a seal that lies asks for no memory beyond it."""
    disk = tier()
    save(disk, tide, "a")
    path_of(disk, "a").write_bytes(file_form_of("a", seal).header + bytes(8192))
    rooms: list[int] = []

    def make_room(found: Seal) -> list[memoryview]:
        rooms.extend(found.used_bytes)
        return [memoryview(bytearray(size_bytes)) for size_bytes in found.used_bytes]

    with pytest.raises(SnapshotDamaged):
        disk.get("a", make_room)
    assert sum(rooms) <= 8192
    assert not disk.contains("a")


def test_tensors_that_overlap_are_refused(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """The places of the chunks are those that the seal gives, and no others."""
    disk = tier()
    save(disk, tide, "a", 200)
    path = path_of(disk, "a")
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    fields["chunk.1"]["data_offsets"] = fields["chunk.0"]["data_offsets"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(whole[:8] + text + whole[8 + length :])
    with pytest.raises(SnapshotDamaged, match="its header isn't the one of its key"):
        disk.get("a", lambda seal: pytest.fail("no room is needed"))


def put_in_place(path: Path, elsewhere: Path, kind: str) -> None:
    """Moves a file, or its folder, elsewhere, and puts something else in its place."""
    if kind == "linked shard":
        path.parent.rename(elsewhere)
        path.parent.symlink_to(elsewhere)
        return
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        except PermissionError:  # only root makes one; a socket is no regular file, either
            os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        (path / "something").mkdir(parents=True)


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_only_a_regular_file_is_opened(
    tier: Callable[..., DiskTier],
    tide: Tide,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Anything else is damage, and moved aside unopened, as a device may act when it is opened."""
    disk = tier(limit_bytes=2 * FILE_BYTES)
    save(disk, tide, "a")
    put_in_place(path_of(disk, "a"), tmp_path / "elsewhere", kind)
    opened: list[str] = []
    whole_open = os.open

    def note(path: Any, *rest: Any, **more: Any) -> int:
        opened.append(Path(path).name)
        return whole_open(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", note)
        with pytest.raises(SnapshotDamaged, match="it isn't a regular file"):
            disk.load("a", tide.arena)
    assert path_of(disk, "a").name not in opened
    assert not disk.contains("a")
    for key in "abc":  # what was moved aside makes room, and is no obstacle
        save(disk, tide, key)
    assert 2 * FILE_BYTES == disk.stats.used_bytes
    disk.close()
    assert 2 == tier().stats.snapshots


def test_linked_shard_is_a_miss(tier: Callable[..., DiskTier], tide: Tide, tmp_path: Path) -> None:
    """A link in the place of a folder isn't followed, to read or to remove."""
    disk = tier(limit_bytes=FILE_BYTES)
    save(disk, tide, "a")
    put_in_place(path_of(disk, "a"), tmp_path / "elsewhere", "linked shard")
    with pytest.raises(SnapshotMiss):
        disk.load("a", tide.arena)
    save(disk, tide, "b")
    assert [path_of(disk, "a").name] == [f.name for f in (tmp_path / "elsewhere").iterdir()]
    disk.close()
    assert 1 == tier().stats.snapshots


def test_folder_under_a_files_name_is_no_obstacle(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """A put moves somebody's folder out of the way, with all that is in it."""
    disk = tier()
    save(disk, tide, "a")
    disk.remove("a")
    (path_of(disk, "a") / "something").mkdir(parents=True)
    save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()
    assert 1 == len(list(disk._folder.path.glob("damaged/*/something")))


# ---- a bad disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_failed_write_keeps_what_was_there(
    tier: Callable[..., DiskTier],
    tide: Tide,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
) -> None:
    """The error says whether a later try may work; no part of a file is left in the folder."""
    disk = tier(keeps_used=True)
    save(disk, tide, "a", 10)
    is_full = number == errno.ENOSPC and call not in ("rename", "fsync")
    error, text = (TierFull, "has no") if is_full else (TierRetry, os.strerror(number))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(error, match=text):
            save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()
    files = [path for path in disk._folder.path.glob("??/*") if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in files) == disk.stats.used_bytes
    save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()


def test_draft_that_the_disk_does_not_let_go_is_removed_first(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything else is written it must go, so that the limit is kept."""
    disk = tier(limit_bytes=2 * FILE_BYTES)
    save(disk, tide, "a")
    drafts = disk._folder.path.glob

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with monkeypatch.context() as inner:
            inner.setattr(os, "fdatasync", fail)
            with pytest.raises(TierRetry):
                save(disk, tide, "b")
        for _ in range(2):
            with pytest.raises(TierRetry):
                save(disk, tide, "b")
            assert 1 == len(list(drafts("*/*.part")))
        disk.load("a", tide.arena).lease.release()
    save(disk, tide, "b")
    assert [] == list(drafts("*/*.part"))
    assert 2 * FILE_BYTES == disk.stats.used_bytes == bytes_in(disk._folder.path)


def test_short_writes_and_reads_go_on(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may move less than it was asked to; the rest follows."""
    disk = tier()
    whole_write, whole_read = os.pwritev, os.preadv
    monkeypatch.setattr(
        os, "pwritev", lambda file, parts, place: whole_write(file, [parts[0][:100]], place)
    )
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, place: whole_read(file, [parts[0][:77]], place)
    )
    monkeypatch.setattr(disk._folder, "_is_direct", False)
    save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()


def test_read_error_is_no_loss(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO may pass: the file stays, and a later read hits."""
    disk = tier()
    save(disk, tide, "a")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(TierRetry, match="Input/output error"):
            disk.load("a", tide.arena)
    assert 0 == tide.arena.used_bytes
    disk.load("a", tide.arena).lease.release()


def test_disk_that_was_away_comes_back(
    tier: Callable[..., DiskTier], tide: Tide, tmp_path: Path
) -> None:
    """While the folder is away, or another one is in its place, nothing is written."""
    disk = tier()
    save(disk, tide, "a")
    folder, away = disk._folder.path, tmp_path / "away"
    shutil.copytree(folder, away)
    shutil.rmtree(folder)
    for in_its_place in (False, True):
        if in_its_place:
            folder.mkdir()
        for _ in range(2):
            with pytest.raises((TierRetry, SnapshotMiss)):
                save(disk, tide, "b")
        assert not in_its_place or [] == list(folder.iterdir())
    folder.rmdir()
    away.rename(folder)
    disk.load("a", tide.arena).lease.release()
    save(disk, tide, "b")
    assert 2 == disk.stats.snapshots


# ---- the file -----------------------------------------------------------------------------------


def test_any_reader_of_safetensors_opens_it(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """The tensors are the chunks, and each begins at a multiple of 4,096 bytes."""
    disk = tier()
    snapshot = tide.offload(range(200), key="a")
    disk.save("a", snapshot)
    path = path_of(disk, "a")
    with safe_open(path, "pt") as file:
        chunks = [file.get_tensor(f"chunk.{n}") for n in range(len(snapshot.chunks))]
        seal = Seal.from_json(file.metadata()["seal"])
    assert [bytes(chunk) for chunk in snapshot.chunks] == [bytes(c.numpy()) for c in chunks]
    assert snapshot.seal == seal
    fields = json.loads(path.read_bytes()[8:].split(b"    ")[0])
    length = int.from_bytes(path.read_bytes()[:8], "little")
    for number in range(len(chunks)):
        assert 0 == (8 + length + fields[f"chunk.{number}"]["data_offsets"][0]) % 4096
    tide.discard(snapshot)


def test_large_snapshot_goes_past_the_cache(
    tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system takes direct I/O, a snapshot of whole pages uses it both ways."""
    disk = tier(limit_bytes=64 << 20)
    flags: list[int] = []
    opened = os.open

    def note(path: Any, flag: int, *rest: Any, **more: Any) -> int:
        flags.append(flag & os.O_DIRECT)
        return opened(path, flag, *rest, **more)

    with closing(CPUDevice(lanes=2)) as device:
        geometry = GQA.bind(dtype="uint8", token=64, layer=2, head=2, head_dim=64, v_head_dim=64)
        pool = Pool.create(geometry, device, page_count=256)
        tide = Tide(pool, HostArena(device, limit_bytes=32 << 20, block_bytes=1 << 20))
        for buffer in pool.buffers:
            buffer.random_(0, 256)
        snapshot = tide.offload(range(256 * 64), key="a")
        monkeypatch.setattr(os, "open", note)
        disk.save("a", snapshot)
        loaded = disk.load("a", tide.arena)
        assert snapshot.chunks == loaded.chunks
        assert disk._folder._is_direct is any(flags)
        tide.discard(loaded)
        tide.discard(snapshot)


# ---- the limit while calls are under way ---------------------------------------------------------


def bytes_in(folder: Path) -> int:
    """What all files of a tier take, drafts and damaged ones included."""
    found = [path.lstat().st_size for path in folder.glob("*/*") if path.is_file()]
    return sum(found)


def test_limit_holds_at_every_step(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each change of the disk, all files together are within the limit."""
    disk = tier(limit_bytes=3 * FILE_BYTES)
    checked = 0

    def watch(name: str) -> None:
        whole = getattr(os, name)

        def call(*values: Any, **more: Any) -> Any:
            nonlocal checked
            result = whole(*values, **more)
            checked += 1
            assert bytes_in(disk._folder.path) <= disk.stats.used_bytes <= 3 * FILE_BYTES
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "fdatasync", "rename", "unlink", "fsync"):
        watch(name)
    for key in "abcdaabe":
        save(disk, tide, key)
    disk.remove("a")
    assert bytes_in(disk._folder.path) == disk.stats.used_bytes
    assert checked > 40


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_file_counts_while_it_is_read(
    tier: Callable[..., DiskTier], tide: Tide, change: str
) -> None:
    """Its bytes are on the disk until the reader has closed it, whatever has its name."""
    disk = tier(limit_bytes=2 * FILE_BYTES)
    save(disk, tide, "a")

    def make_room(seal: Seal) -> list[memoryview]:
        if change == "replaced":
            save(disk, tide, "a")
        else:
            disk.remove("a")
            save(disk, tide, "b")
        assert 2 * FILE_BYTES == disk.stats.used_bytes
        save(disk, tide, "c")  # the one that nobody reads leaves
        assert 2 * FILE_BYTES == disk.stats.used_bytes
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    disk.get("a", make_room)
    assert (1, FILE_BYTES) == (disk.stats.snapshots, disk.stats.used_bytes)


def test_file_that_is_read_stays_though_others_are_newer(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """While it is read, a file that was used later leaves in its place."""
    disk = tier(limit_bytes=3 * FILE_BYTES)
    for key in "ab":
        save(disk, tide, key)

    def make_room(seal: Seal) -> list[memoryview]:
        for key in "cd":
            save(disk, tide, key)
        assert [True, False, True, True] == [disk.contains(key) for key in "abcd"]
        save(disk, tide, "e")
        assert [True, False, True, True] == [disk.contains(key) for key in "acde"]
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    disk.get("a", make_room)


def test_no_file_leaves_in_vain(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """If a file that is being read keeps a snapshot from having room, the others stay."""
    disk = tier(limit_bytes=3 * FILE_BYTES)
    for key in "abc":
        save(disk, tide, key)

    def make_room(seal: Seal) -> list[memoryview]:
        with pytest.raises(TierFull, match=f"{FILE_BYTES} of {3 * FILE_BYTES} in use"):
            save(disk, tide, "d", 240)
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    disk.get("a", make_room)
    assert all(disk.contains(key) for key in "abc")


class Caller:
    """Calls a tier at random, over three keys; each read is checked. Some files are cut off."""

    def __init__(self, disk: DiskTier, snapshots: list[Snapshot], seed: int) -> None:
        self.disk = disk
        self.snapshots = snapshots
        self.chance = random.Random(seed)
        self.outcomes: set[str] = set()

    def go(self, count: int) -> set[str]:
        """Makes `count` calls; gives their outcomes."""
        acts = [self.save, self.load, self.remove, self.cut]
        for _ in range(count):
            act = self.chance.choices(acts, (40, 40, 10, 10))[0]
            try:
                act(self.chance.choice("abc"))
                self.outcomes.add(act.__name__)
            except (SnapshotMiss, SnapshotDamaged, TierFull) as error:
                self.outcomes.add(type(error).__name__)
            stats = self.disk.stats
            assert 0 <= stats.used_bytes <= stats.limit_bytes
        return self.outcomes

    def save(self, key: str) -> None:
        self.disk.save(key, self.chance.choice(self.snapshots))

    def load(self, key: str) -> None:
        rooms: list[bytearray] = []

        def make_room(seal: Seal) -> list[memoryview]:
            rooms[:] = [bytearray(size_bytes) for size_bytes in seal.used_bytes]
            return [memoryview(room) for room in rooms]

        seal = self.disk.get(key, make_room)
        (source,) = (s for s in self.snapshots if s.seal == seal)
        assert [bytes(chunk) for chunk in source.chunks] == rooms

    def remove(self, key: str) -> None:
        self.disk.remove(key)

    def cut(self, key: str) -> None:
        with suppress(OSError), path_of(self.disk, key).open("r+b") as file:
            file.truncate(4096)


@pytest.mark.parametrize("seed", range(3))
def test_threads_never_get_other_bytes(
    tier: Callable[..., DiskTier], tide: Tide, seed: int
) -> None:
    """Calls of all kinds, side by side, over few keys and little room, with damage: books hold."""
    disk = tier(limit_bytes=4 * FILE_BYTES)
    snapshots = [tide.offload(range(count), key=str(count)) for count in range(33, 41)]
    outcomes: set[str] = set()
    with ThreadPoolExecutor(4) as threads:
        callers = [Caller(disk, snapshots, 100 * seed + number) for number in range(4)]
        for done in [threads.submit(caller.go, 60) for caller in callers]:
            outcomes |= done.result()
    for snapshot in snapshots:
        tide.discard(snapshot)
    assert {"save", "load", "remove", "cut", "SnapshotMiss", "SnapshotDamaged"} <= outcomes
    assert (0, {}) == (disk._books._busy_bytes, disk._books._readings)
    names = {path.stem for path in disk._folder.path.glob("??/*")}
    assert names == set(disk._books._files)
    aside = list(disk._folder.path.glob("damaged/*"))
    assert (len(names) + len(aside)) * FILE_BYTES == disk.stats.used_bytes


# ---- a disk that is lost, closed, forked or interrupted ------------------------------------------


def test_what_is_on_the_disk_outlives_a_power_cut(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put writes, syncs the file, names it, and syncs the folder, in this order."""
    calls: list[str] = []

    def watch(name: str) -> None:
        whole = getattr(os, name)

        def call(*values: Any, **more: Any) -> Any:
            calls.append(name)
            return whole(*values, **more)

        monkeypatch.setattr(os, name, call)

    for name in ("mkdir", "pwritev", "fdatasync", "rename", "fsync"):
        watch(name)
    disk = tier()
    assert ["mkdir", "fsync"] == calls[:2]
    calls.clear()
    save(disk, tide, "a")
    # The folder of the file is new.
    assert ["mkdir", "fsync", "pwritev", "fdatasync", "rename", "fsync"] == calls


def test_disk_that_can_only_be_read_still_gives(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only disk reads hit, damage is found once, puts can be tried again later."""
    disk = tier(limit_bytes=2 * FILE_BYTES)
    for key in "ab":
        save(disk, tide, key)
    with path_of(disk, "b").open("r+b") as file:
        file.truncate(4096)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "mkdir", "utime", "pwritev"):
            patch.setattr(os, name, refuse)
        disk.load("a", tide.arena).lease.release()
        with pytest.raises(SnapshotDamaged):
            disk.load("b", tide.arena)
        assert not disk.contains("b")
        with pytest.raises(SnapshotMiss):
            disk.load("b", tide.arena)
        for call in (partial(save, disk, tide, "c"), partial(disk.remove, "a")):
            with pytest.raises(TierRetry, match="Read-only"):
                call()
    assert 1 == disk.stats.damaged
    assert 2 * FILE_BYTES == disk.stats.used_bytes
    for key in "bc":
        save(disk, tide, key)
        disk.load(key, tide.arena).lease.release()
    assert 2 * FILE_BYTES == disk.stats.used_bytes == bytes_in(disk._folder.path)


def test_damage_counts_once(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """Two calls that read a damaged file at the same time both find it; it is one file."""
    disk = tier()
    save(disk, tide, "a")
    path = path_of(disk, "a")
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))

    def make_room(seal: Seal) -> list[memoryview]:
        with pytest.raises(SnapshotDamaged):
            disk.load("a", tide.arena)
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    with pytest.raises(SnapshotDamaged):
        disk.get("a", make_room)
    assert (1, FILE_BYTES) == (disk.stats.damaged, disk.stats.used_bytes)


def test_closed_tier_holds_its_lock_for_the_call_under_way(
    tier: Callable[..., DiskTier], tide: Tide
) -> None:
    """The lock is given back with the end of the last call, and later calls don't take it again."""
    disk = tier()
    save(disk, tide, "a")

    def make_room(seal: Seal) -> list[memoryview]:
        disk.close()
        with pytest.raises(UsageError, match="another process"):
            tier()
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    disk.get("a", make_room)
    for call in (partial(save, disk, tide, "b"), partial(disk.remove, "a")):
        with pytest.raises(TierRetry, match="closed"):
            call()
    assert tier().contains("a")


def test_close_does_not_wait_for_a_call_that_hangs(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for one that hangs while it changes the books; its end gives the lock back."""
    monkeypatch.setattr(disk_module, "_CLOSE_WAIT_S", 0.01)
    disk = tier()
    save(disk, tide, "a")
    begun, gate = threading.Event(), threading.Event()
    whole = os.unlink

    def hang(*values: Any, **more: Any) -> None:
        begun.set()
        gate.wait()
        whole(*values, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", hang)
        removing = threading.Thread(target=disk.remove, args=("a",))
        removing.start()
        begun.wait()
        disk.close()
        gate.set()
        removing.join()
    assert not tier().contains("a")


def test_lost_folder_is_opened_again_when_no_call_uses_it(
    tier: Callable[..., DiskTier], tide: Tide, tmp_path: Path
) -> None:
    """While it is away nothing is contained; a call that began before ends on its descriptors."""
    disk = tier()
    for key in "ab":
        save(disk, tide, key)
    folder, away = disk._folder.path, tmp_path / "away"

    def make_room(seal: Seal) -> list[memoryview]:
        folder.rename(away)
        path = away / path_of(disk, "b").relative_to(folder)
        path.rename(away / "elsewhere")
        path.parent.rmdir()
        path.parent.write_bytes(b"")
        with pytest.raises(TierRetry):
            save(disk, tide, "b")
        assert not disk.contains("a")
        path.parent.unlink()
        path.parent.mkdir()
        (away / "elsewhere").rename(path)
        away.rename(folder)
        with pytest.raises(TierRetry, match="when the calls under way have ended"):
            save(disk, tide, "c")
        return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

    disk.get("a", make_room)
    save(disk, tide, "c")
    assert all(disk.contains(key) for key in "abc")
    assert bytes_in(folder) == disk.stats.used_bytes


def test_forked_process_leaves_the_folder_alone(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """The child can't use the tier, and neither frees the parent's lock nor keeps it."""
    disk = tier()
    save(disk, tide, "a")
    snapshot = tide.offload(range(8), key="b")
    ready, go_on, lock = os.pipe(), os.pipe(), disk._folder._lock
    child = os.fork()
    if not child:
        code = 1
        try:
            with suppress(ProcessForked):
                disk.save("b", snapshot)
                os._exit(2)
            with suppress(OSError):  # a killed parent's lock must end with it
                os.fstat(lock)
                os._exit(3)
            disk.close()
            os.write(ready[1], b"1")
            os.read(go_on[0], 1)
            code = 0
        finally:
            os._exit(code)
    os.close(ready[1])
    assert b"1" == os.read(ready[0], 1)
    with pytest.raises(UsageError, match="another process"):
        tier()
    disk.close()
    tier().close()
    os.write(go_on[1], b"1")
    assert (child, 0) == os.waitpid(child, 0)
    tide.discard(snapshot)
    for descriptor in (ready[0], *go_on):
        os.close(descriptor)


@pytest.mark.parametrize("act", ["put", "get", "remove"])
def test_interrupt_at_any_instruction_leaves_the_books_right(
    tmp_path: Path, tide: Tide, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """After Ctrl-C in the calling thread no byte is counted twice or forgotten, and no draft stays.

    The key has what it had, the new snapshot, or nothing.
    """
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)
    long, short = (tide.offload(range(count), key="a") for count in (40, 39))
    count = 0

    def make() -> tuple[DiskTier, Callable[[], Any]]:
        nonlocal count
        count += 1
        disk = DiskTier(tmp_path / str(count), limit_bytes=2 * FILE_BYTES)
        disk.save("a", long)
        disk.save("b", long)

        def make_room(seal: Seal) -> list[memoryview]:
            return [memoryview(bytearray(size_bytes)) for size_bytes in seal.used_bytes]

        acts = {
            "put": lambda: disk.save("a", short),
            "get": lambda: disk.get("a", make_room),
            "remove": lambda: disk.remove("a"),
        }
        return disk, acts[act]

    for place, disk, _ in every_interrupt(make):
        gc.collect(0)
        disk.save("c", long)  # it removes the oldest
        assert disk.contains("c"), place
        for key in "ab":
            with suppress(SnapshotMiss):
                found = disk.load(key, tide.arena)
                assert found.seal in (long.seal, short.seal), place
                tide.discard(found)
        files = list(disk._folder.path.glob("??/*"))
        assert {f.stem for f in files} == set(disk._books._files), place
        assert bytes_in(disk._folder.path) == disk.stats.used_bytes <= 2 * FILE_BYTES, place
        assert 0 == disk._books._busy_bytes, place
        disk.close()
    assert count > 30
    for snapshot in (long, short):
        tide.discard(snapshot)


# ---- the start -----------------------------------------------------------------------------------


def test_orphans_of_every_kind_go(tier: Callable[..., DiskTier], tide: Tide) -> None:
    """A killed process may leave drafts also where direct I/O is tried; a folder is no draft."""
    first = tier()
    save(first, tide, "a")
    first.close()
    root, shard = first._folder.path, path_of(first, "a").parent
    name = f".{'a' * 32}.{'b' * 16}.part"
    for folder in (root, shard):
        (folder / name).write_bytes(b"12345")
    link = shard / f".{'a' * 32}.{'c' * 16}.part"
    link.symlink_to(path_of(first, "a"))
    (shard / f".{'a' * 32}.{'d' * 16}.part").mkdir()
    second = tier()
    assert not any(os.path.lexists(path) for path in (root / name, shard / name, link))
    second.load("a", tide.arena).lease.release()


def test_process_killed_while_it_made_the_folder_is_no_obstacle(
    tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    """An empty lock file, or one of zeros, becomes a lock file."""
    (tmp_path / "tier").mkdir()
    for content in (b"", bytes(61)):
        (tmp_path / "tier" / "kvtide.lock").write_bytes(content)
        tier().close()
    tier().close()


@pytest.mark.parametrize("kind", ["text", "link", "pipe", "folder"])
def test_lock_of_others_is_refused(
    tier: Callable[..., DiskTier], tmp_path: Path, kind: str
) -> None:
    """A file that isn't a lock of this version is refused, and a link isn't followed."""
    (tmp_path / "tier").mkdir()
    lock, elsewhere = tmp_path / "tier" / "kvtide.lock", tmp_path / "elsewhere"
    elsewhere.touch()
    if kind == "text":
        lock.write_bytes(b'{"kvtide_disk_tier":2}')
    else:
        lock.touch()
        put_in_place(lock, elsewhere, kind)
    with pytest.raises(UsageError, match="cannot use the folder"):
        tier()
    assert b"" == elsewhere.read_bytes()


@pytest.mark.parametrize("call", ["unlink", "scandir", "stat"])
def test_start_on_a_bad_disk_says_so(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What the disk refuses at the start is an error for a person, and the lock is given back."""
    first = tier()
    for key in "ab":
        save(first, tide, key)
    first.close()
    path_of(first, "a").with_name(f".{'a' * 32}.{'b' * 16}.part").touch()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if call != "stat":
            with pytest.raises(UsageError, match=r"cannot use the folder .*: Input/output error"):
                tier()
    assert 2 == tier().stats.snapshots


def test_direct_io_that_fails_later_is_given_up(
    tier: Callable[..., DiskTier], tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system refuses it later, the next try goes through the cache."""
    disk = tier()
    monkeypatch.setattr(disk._folder, "_is_direct", True)
    monkeypatch.setattr("kvtide.tier.folder.are_aligned", lambda parts: True)
    whole = os.pwritev

    def refuse(file: int, parts: Any, place: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(file, parts, place)

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(TierRetry, match="Invalid argument"):
        save(disk, tide, "a")
    save(disk, tide, "a")


# ---- real faults ---------------------------------------------------------------------------------

CONTENT_BYTES = 40_000


def content_of(number: int) -> bytes:
    """The bytes of a snapshot with that number."""
    return number.to_bytes(8, "little") * (CONTENT_BYTES // 8)


def put_for_ever(folder: Path, output: int) -> None:
    """Puts snapshots 0, 1, … under seven keys in turn, and writes a byte after each put."""
    disk = DiskTier(folder, limit_bytes=1 << 20)
    os.write(output, b".")
    for number in itertools.count():
        content = content_of(number)
        span = Span(0, 0, CONTENT_BYTES, xxhash.xxh3_64_intdigest(content))
        seal = Seal('{"groups":[]}', str(number), 1, (), (), CONTENT_BYTES, (span,))
        disk.put(str(number % 7), seal, [memoryview(content)])
        os.write(output, b".")


@pytest.mark.parametrize("seed", range(8))
def test_killed_writer_loses_nothing_that_was_put(tmp_path: Path, seed: int) -> None:
    """SIGKILL at a random moment: each key has what was put last, or what was just being put."""
    results, output = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            put_for_ever(tmp_path / "tier", output)
        finally:
            os._exit(1)
    os.close(output)
    chance = random.Random(seed)
    count = sum(len(os.read(results, 1)) for _ in range(chance.randrange(2, 80)))
    time.sleep(chance.random() / 100)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while dots := os.read(results, 1 << 16):
        count += len(dots)
    os.close(results)
    put_count = count - 1
    with closing(DiskTier(tmp_path / "tier", limit_bytes=1 << 20)) as disk:
        for number in range(max(0, put_count - 7), put_count):
            room = memoryview(bytearray(CONTENT_BYTES))
            seal = disk.get(str(number % 7), partial(lambda room, seal: [room], room))
            assert int(seal.key) in (number, number + 7)
            assert content_of(int(seal.key)) == room
        assert bytes_in(tmp_path / "tier") == disk.stats.used_bytes


@pytest.fixture
def disk_of_8_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 8 MiB; where this user can't mount one, files that end with ENOSPC there."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    can_mount = shutil.which("mount") is not None
    if can_mount and not subprocess.run(mount, capture_output=True, check=False).returncode:
        yield place
        subprocess.run(["umount", place], check=True)
        return
    whole = os.pwritev

    def write(file: int, parts: Any, offset: int) -> int:
        if bytes_in(place / "tier") + sum(part.nbytes for part in parts) > 8 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", write)
    yield place


@pytest.mark.parametrize("keeps_used", [True, False])
def test_full_disk_takes_what_it_has_room_for(
    disk_of_8_mib: Path, tide: Tide, monkeypatch: pytest.MonkeyPatch, keeps_used: bool
) -> None:
    """On a disk that is full before the limit is reached, the same leaves as at the limit.

    No draft stays, one warning comes, and the tier goes on where there is room again.
    """
    warnings: list[str] = []
    monkeypatch.setattr(
        disk_module.logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    folder = disk_of_8_mib / "tier"
    with closing(DiskTier(folder, limit_bytes=1 << 30, keeps_used=keeps_used)) as disk:
        snapshot = tide.offload(range(256), key="a")
        full = 0
        for number in range(300):
            try:
                disk.save(str(number), snapshot)
            except TierFull:
                full += 1
            if number % 50 == 0:
                assert bytes_in(folder) == disk.stats.used_bytes <= 8 << 20
        kept = [number for number in range(300) if disk.contains(str(number))]
        assert 100 < len(kept) < 256
        assert 300 == len(kept) + (full if keeps_used else disk.stats.evicted)
        assert (0 in kept, 299 in kept) == (keeps_used, not keeps_used)
        for number in kept:
            disk.load(str(number), tide.arena).lease.release()
        disk.remove(str(kept[0]))
        disk.save("new", snapshot)
        disk.load("new", tide.arena).lease.release()
        assert 1 == len(warnings)
        assert "is full" in warnings[0]
        assert str(disk_of_8_mib) not in warnings[0]
        assert bytes_in(folder) == disk.stats.used_bytes <= 8 << 20
        tide.discard(snapshot)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """A place with a file system of its own, or one that acts so."""
    place = Mounted(tmp_path)
    yield place
    place.close()


class Mounted:
    """A folder on a disk that may be taken away, and come back as it was.

    Where this user can't mount one, the folder is moved.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path / "mounted"
        self.place.mkdir()
        self._image, self._away = tmp_path / "image", tmp_path / "away"
        self._image.mkdir()
        self.is_real = self._mount("-t", "tmpfs", "none", self._image)
        self._is_here = False
        self.come_back()

    def _mount(self, *words: object) -> bool:
        if shutil.which("mount") is None:
            return False
        done = subprocess.run(["mount", *map(str, words)], capture_output=True, check=False)
        return not done.returncode

    def _unmount(self, place: Path) -> None:
        # Open files keep the file system; the place has it no more at once.
        subprocess.run(["umount", "--lazy", str(place)], check=True)

    def come_back(self) -> None:
        """The disk is there, as it was."""
        if self.is_real:
            assert self._mount("--bind", self._image, self.place)
        elif self._away.exists():
            shutil.rmtree(self.place)
            self._away.rename(self.place)
        self._is_here = True

    def vanish(self) -> None:
        """The place is an empty folder of another disk."""
        if self.is_real:
            self._unmount(self.place)
        else:
            shutil.copytree(self.place, self._away)
            shutil.rmtree(self.place)
            self.place.mkdir()
        self._is_here = False

    def close(self) -> None:
        """Leaves no mount behind."""
        if self.is_real:
            for place in [self.place] * self._is_here + [self._image]:
                self._unmount(place)


def open_spilling(disk: DiskTier, tide: Tide, rests: list[float]) -> tuple[Tide, Spill]:
    """A tide over an arena of two requests, and the disk below.

    The clock is as far ahead as `rests` together.
    """
    arena = HostArena(tide.pool.device, limit_bytes=2 * 64 * 128, block_bytes=64 * 128)
    spill = Spill(
        arena, [disk], clock=lambda: time.monotonic() + sum(rests), sleep=lambda seconds: None
    )
    return Tide(tide.pool, arena, spill=spill), spill


def check_all(tide: Tide, snapshots: dict[int, Snapshot]) -> None:
    """Each snapshot gives the bytes back with which its slots were filled."""
    for value, snapshot in snapshots.items():
        tide.restore(snapshot, range(64, 128))
        for buffer in tide.pool.buffers:
            rows = buffer.view(torch.uint8).view(2, 256, -1)[:, 64:128]
            assert bool((rows == value).all()), value


def fill(tide: Tide, snapshots: dict[int, Snapshot], values: range) -> int:
    """Saves a request for each value; how many found no room."""
    refused = 0
    for value in values:
        for buffer in tide.pool.buffers:
            buffer.view(torch.uint8).fill_(value)
        try:
            snapshots[value] = tide.offload(range(64))
        except ArenaFull:
            refused += 1
    return refused


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder of this user's, who isn't root meanwhile: to root nothing is read-only."""
    folder = Path(tempfile.mkdtemp(prefix="kvtide-read-only-"))
    user = os.geteuid()
    if not user:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def set_read_only(folder: Path, is_read_only: bool) -> None:
    """Nothing can be made or removed in the folder and those in it, or everything again."""
    for path in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        path.chmod(0o555 if is_read_only else 0o700)


def test_folder_made_read_only_under_way(own_folder: Path, tide: Tide) -> None:
    """What was written is read, new requests find the arena full, and all goes on afterwards."""
    folder = own_folder / "tier"
    disk = DiskTier(folder, limit_bytes=8 << 20, keeps_used=True)
    rests: list[float] = []
    small, spill = open_spilling(disk, tide, rests)
    snapshots: dict[int, Snapshot] = {}
    with closing(disk), closing(spill):
        assert 0 == fill(small, snapshots, range(6))
        spill.make_room(2)
        set_read_only(folder, True)
        with pytest.raises(TierRetry, match=r"^disk tier: Permission denied$"):
            save(disk, tide, "any")
        check_all(small, snapshots)
        assert 8 < fill(small, snapshots, range(10, 20))
        check_all(small, snapshots)
        set_read_only(folder, False)
        rests.append(100.0)
        assert 0 == fill(small, snapshots, range(20, 26))
        check_all(small, snapshots)
        for snapshot in snapshots.values():
            small.discard(snapshot)
    assert not list(folder.glob("??/*"))


def test_disk_that_vanishes_and_comes_back(mounted: Mounted, tide: Tide) -> None:
    """While it is away nothing is written in its place; what is on it is there when it is back.

    Descriptors that were opened before may still reach it.
    """
    disk = DiskTier(mounted.place / "tier", limit_bytes=8 << 20, keeps_used=True)
    save(disk, tide, "a")
    with closing(disk):
        mounted.vanish()
        for number in range(3):
            with suppress(TierRetry):
                save(disk, tide, f"away {number}")
            with pytest.raises((TierRetry, SnapshotMiss)):
                disk.load("missing", tide.arena)
            assert [] == list(mounted.place.iterdir())
        mounted.come_back()
        disk.load("a", tide.arena).lease.release()
        save(disk, tide, "b")
        assert [True, True] == [disk.contains(key) for key in "ab"]
        assert bytes_in(mounted.place / "tier") == disk.stats.used_bytes
