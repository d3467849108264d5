from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kvtide.arena import HostArena
from kvtide.conformance import TierTests
from kvtide.device import CPUDevice
from kvtide.errors import (
    LayoutError,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
    UsageError,
)
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.tide import Tide
from kvtide.tier import DiskTier, Tier
from kvtide.tier.disk import _name_of

FILE_BYTES = 4096 + 8192
"""The file of 40 tokens of `tide`: its header, and 40 rows of 128 bytes."""


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens a tier on the test's folder."""
    opened: list[DiskTier] = []

    def open_tier(*, limit_bytes: Any = 8 << 20) -> DiskTier:
        opened.append(DiskTier(tmp_path / "tier", limit_bytes=limit_bytes))
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
    name = _name_of(key)
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


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "linked shard"])
def test_only_a_regular_file_is_opened(
    tier: Callable[..., DiskTier], tide: Tide, tmp_path: Path, kind: str
) -> None:
    """Links, pipes and folders aren't read, and a pipe without a writer is no reason to wait."""
    disk = tier()
    save(disk, tide, "a")
    path, elsewhere = path_of(disk, "a"), tmp_path / "elsewhere"
    if kind == "linked shard":
        path.parent.rename(elsewhere)
        path.parent.symlink_to(elsewhere)
    else:
        path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises((TierRetry, SnapshotMiss)):
        disk.load("a", tide.arena)
    disk.close()
    assert 0 == tier().stats.snapshots


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
    """The error says that a later try may work; no part of a file is left in the folder."""
    disk = tier()
    save(disk, tide, "a", 10)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(TierRetry, match=os.strerror(number)):
            save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()
    files = [path for path in disk._folder.path.glob("??/*") if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in files) == disk.stats.used_bytes
    save(disk, tide, "a")
    disk.load("a", tide.arena).lease.release()


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
