"""With KVTIDE_DISK_DIR, requests for which host memory has no room go to files, and come back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from requests_of import Place, Req, keeper_over, raising, read_ahead, same

from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss, UsageError
from kvtide.plugin import below
from kvtide.plugin.environment import Below
from kvtide.plugin.keeper import Backup, Keeper
from kvtide.plugin.sglang.settings import Settings, read_settings
from kvtide.plugin.status import coverage
from kvtide.tier import Spill
from kvtide.tier.names import LOCK

COUNT = 8
HOST_BYTES = 2 << 16
"""The arena has two blocks, and each request takes one."""


def settings(folder: Path | None) -> Settings:
    """Makes the settings of a server with little host memory."""
    limit_bytes = None if folder is None else 1 << 20
    return Settings(host_memory_bytes=HOST_BYTES, below=Below(folder, limit_bytes))


@pytest.fixture
def place() -> Place:
    """A pool of three layers, with a row for each token."""
    return Place()


@pytest.fixture
def keeper(place: Place, tmp_path: Path) -> Iterator[Keeper]:
    """A keeper with a disk below its arena."""
    with closing(
        keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "kv"))
    ) as keeper:
        assert 2 == keeper.arena.block_count
        yield keeper
    assert 0 == keeper.arena.used_bytes, "nothing may be left in the arena"
    assert not list((tmp_path / "kv").glob("*/??/*.safetensors")), "nor on the disk"


def retract(place: Place, keeper: Keeper, number: int) -> tuple[Req, list[torch.Tensor], Backup]:
    """Saves a request of random bytes, and gives its slots back."""
    req = place.admit(f"r{number}", 20)
    slots = place.request_pool.req_to_token[1, :19].long()
    for buffer in place.buffers:
        buffer[slots] = torch.randn_like(buffer[slots])
    expected, backup = place.rows_of(req), keeper.save(req)
    place.allocator.free(slots)
    return req, expected, backup


def resume(place: Place, keeper: Keeper, req: Req, backup: Backup) -> None:
    """Restores a request to other slots."""
    place.poison()
    place.readmit(req)
    keeper.restore(req, backup)


def spill_of(keeper: Keeper) -> Spill:
    """Returns what moves the keeper's backups to the disk and back."""
    assert keeper.spill is not None
    return keeper.spill


def test_more_requests_than_host_memory_has_room_for_come_back(
    place: Place, keeper: Keeper
) -> None:
    """All bytes are equal, and the arena's limit is kept."""
    retracted = [retract(place, keeper, number) for number in range(COUNT)]
    assert keeper.arena.peak_bytes <= HOST_BYTES
    for req, expected, backup in retracted[::2] + retracted[1::2]:
        resume(place, keeper, req, backup)
        assert same(expected, place.rows_of(req))
        place.allocator.free(place.request_pool.req_to_token[2, :19].long())
    assert (COUNT, COUNT) == (keeper.counters.saves, keeper.counters.restores)


def test_without_a_disk_they_are_refused(place: Place) -> None:
    """The test above is one of the disk: the arena alone has room for two requests."""
    with closing(keeper_over(place.allocator, place.request_pool, [], settings(None))) as keeper:
        backups = [retract(place, keeper, number)[2] for number in range(2)]
        with pytest.raises(ArenaFull):
            retract(place, keeper, 2)
        for backup in backups:
            keeper.discard(backup)


def test_the_next_to_come_back_are_read_ahead(place: Place, keeper: Keeper) -> None:
    """A server says in each step who is next; then nobody waits who has come back meanwhile."""
    retracted = [retract(place, keeper, number) for number in range(COUNT)]
    for number, (req, expected, backup) in enumerate(retracted):
        read_ahead(keeper, [waiting for _, _, waiting in retracted[number:]])
        resume(place, keeper, req, backup)
        assert same(expected, place.rows_of(req))
        place.allocator.free(place.request_pool.req_to_token[2, :19].long())
    stats = spill_of(keeper).stats
    assert COUNT - 2 <= stats.tiers["disk"].hits == stats.reads_in_time
    assert 0 == stats.reads_late


def test_a_hint_never_fails(
    place: Place, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step goes on, and the log has the error."""
    req, _, backup = retract(place, keeper, 0)
    monkeypatch.setattr("kvtide.tier.Spill.read_ahead", raising(OSError("no such device")))
    keeper.read_ahead([backup])
    assert "no such device" in caplog.text
    resume(place, keeper, req, backup)


def test_aborted_requests_leave_no_file(place: Place, keeper: Keeper) -> None:
    """Each is counted once, wherever its bytes are."""
    retracted = [retract(place, keeper, number) for number in range(COUNT)]
    for _, _, backup in retracted:
        keeper.discard(backup)
        keeper.discard(backup)
    assert COUNT == keeper.counters.discards


def test_damaged_file_costs_one_request(place: Place, keeper: Keeper, tmp_path: Path) -> None:
    """The request whose file has a flipped bit isn't restored; the others are."""
    retracted = [retract(place, keeper, number) for number in range(COUNT)]
    files = sorted((tmp_path / "kv").glob("*/??/*.safetensors"))
    content = bytearray(files[0].read_bytes())
    content[-4096] ^= 1
    files[0].write_bytes(bytes(content))
    lost = 0
    for req, expected, backup in retracted:
        try:
            resume(place, keeper, req, backup)
            assert same(expected, place.rows_of(req))
        except (SnapshotDamaged, SnapshotMiss):
            lost += 1
        place.allocator.free(place.request_pool.req_to_token[2, :19].long())
    assert 1 == lost
    for path in (tmp_path / "kv").glob("*/damaged/*"):
        path.unlink()


def test_each_keeper_has_a_folder(place: Place, tmp_path: Path) -> None:
    """Ranks of a server, and servers, may share the folder that the operator names."""
    first = keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "kv"))
    second = keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "kv"))
    names = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert ["retracted-0", "retracted-1"] == names
    tokens = (1 << 20) // first.token_bytes
    assert coverage(first).endswith(
        f", below it disk up to 1.0 MiB on this rank, for {tokens} tokens"
    )
    first.close()
    second.close()


def test_files_of_a_server_that_was_killed_are_removed(place: Place, tmp_path: Path) -> None:
    """SGLang ends its processes by SIGKILL. Nobody can use what they leave, and it takes room.

    A server with fewer ranks would never come to some of the folders. A folder that is in use or
    isn't a rank's isn't touched.
    """
    keepers = [
        keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "kv"))
        for _ in range(3)
    ]
    for number, keeper in enumerate(keepers):
        for request in range(4):
            retract(place, keeper, 4 * number + request)
    killed, running = (tmp_path / "kv" / f"retracted-{number}" for number in (2, 1))
    shutil.copytree(killed, tmp_path / "copy")
    keepers[2].close()
    shutil.copytree(tmp_path / "copy", killed, dirs_exist_ok=True)
    foreign = [tmp_path / "kv" / name for name in ("0", "retracted-7", "retracted-x")]
    for folder in foreign:
        shutil.copytree(tmp_path / "copy", folder)
    (foreign[1] / LOCK).unlink()
    before = [sorted(folder.rglob("*")) for folder in (running, *foreign)]
    assert list(killed.glob("??/*"))
    with closing(keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "kv"))):
        assert [] == list(killed.glob("??/*"))
        assert before == [sorted(folder.rglob("*")) for folder in (running, *foreign)]
    keepers[0].close()
    keepers[1].close()


def test_folder_that_cannot_be_used_is_a_warning(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server saves to host memory as without a disk."""
    warnings: list[str] = []
    monkeypatch.setattr(
        below.logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    (tmp_path / "file").touch()
    with closing(
        keeper_over(place.allocator, place.request_pool, [], settings(tmp_path / "file"))
    ) as keeper:
        req, expected, backup = retract(place, keeper, 0)
        resume(place, keeper, req, backup)
        assert same(expected, place.rows_of(req))
        assert "disk" not in coverage(keeper)
    assert 1 == len(warnings)
    assert warnings[0].startswith("kvtide goes on without a tier: ")


def test_settings_name_the_folder_and_its_limit() -> None:
    """A limit without a folder, or without a unit, is an error that names the variable."""
    found = read_settings({"KVTIDE_DISK_DIR": "/kv", "KVTIDE_DISK_MEMORY": "2GiB"})
    assert Below(Path("/kv"), 2 << 30) == found.below
    assert Below() == read_settings({}).below
    with pytest.raises(UsageError, match="KVTIDE_DISK_MEMORY is the limit of a folder"):
        read_settings({"KVTIDE_DISK_MEMORY": "2GiB"})
    with pytest.raises(UsageError, match="KVTIDE_DISK_MEMORY: '24' has no unit"):
        read_settings({"KVTIDE_DISK_DIR": "/kv", "KVTIDE_DISK_MEMORY": "24"})
