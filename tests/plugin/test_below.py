"""What an operator sets below the arenas: the settings, and a keeper that saves there."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import ArenaFull, KvtideError, SnapshotMiss, UsageError
from kvtide.plugin import below as opening
from kvtide.plugin.below import open_store
from kvtide.plugin.description import Description, Part
from kvtide.plugin.environment import Below, below_of
from kvtide.plugin.keeper import Backup, Keeper, Requests
from kvtide.plugin.status import coverage
from kvtide.tide import Tide
from kvtide.tier import DiskTier, MooncakeSettings
from tier.fake_mooncake import FakeStore

TOKENS = 64
TOKEN_BYTES = 128
STEPS = 10_000
PATIENT_S = 60.0
MOONCAKE = MooncakeSettings("127.0.0.1:50051")


class ToyRequests(Requests):
    """Requests of a toy engine: (its name, its slots)."""

    def id_of(self, request: tuple[str, torch.Tensor]) -> str:
        """The first of the two."""
        return request[0]

    def slots_of(self, request: tuple[str, torch.Tensor]) -> torch.Tensor:
        """The second."""
        return request[1]


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that every rank joins; its master answers."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    monkeypatch.setattr(opening, "check_mooncake", lambda settings: None)
    return store


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of open_store."""
    said: list[str] = []
    monkeypatch.setattr(opening.logger, "warning", lambda text, *more: said.append(text % more))
    return said


def keeper_with(below: Below, rank_count: int = 1) -> Keeper:
    """Makes a rank's keeper, with an arena of two blocks, each of which has room for a request."""
    device = CPUDevice(lanes=1)
    tensor = torch.zeros(4 * TOKENS, TOKEN_BYTES, dtype=torch.uint8)
    description = Description("toy", (Part("kv", [tensor]),), 1, len(tensor), padding_slots=0)
    pool = description.adopt(device)
    block_bytes = TOKENS * TOKEN_BYTES
    arena = HostArena(device, limit_bytes=2 * block_bytes, block_bytes=block_bytes)
    store = open_store(arena, below, rank_count)
    return Keeper(description, Tide(pool, arena, spill=store.spill), ToyRequests(), store=store)


@pytest.fixture
def keepers(mooncake: FakeStore) -> Iterator[list[Keeper]]:
    """Two ranks of a server above the same store."""
    ranks = [keeper_with(Below(mooncake=MOONCAKE), 2) for _ in range(2)]
    yield ranks
    for keeper in ranks:
        keeper.close()


def bytes_in(keeper: Keeper, slots: torch.Tensor) -> torch.Tensor:
    """Returns a copy of what the slots have."""
    return keeper.description.parts[0].tensors[0][slots].clone()


def fill(keeper: Keeper, slots: torch.Tensor, seed: int) -> None:
    """Writes random bytes to slots."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(slots), TOKEN_BYTES)
    new = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    keeper.description.parts[0].tensors[0][slots] = new


def test_ranks_save_to_mooncake_and_share_nothing(
    keepers: list[Keeper], mooncake: FakeStore
) -> None:
    """Requests have the same names on both ranks, and each rank gets its own bytes back."""
    slots, others = torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS)
    saved: dict[tuple[int, int], Any] = {}
    for number in range(6):
        for rank, keeper in enumerate(keepers):
            fill(keeper, slots, 10 * number + rank)
            backup = keeper.save((f"r{number}", slots))
            saved[number, rank] = bytes_in(keeper, slots), backup
    assert 2 * 4 <= len(mooncake.objects)
    assert 2 == len(mooncake.clients)
    for (number, rank), (expected, backup) in saved.items():
        keepers[rank].restore((f"r{number}", others), backup)
        assert torch.equal(expected, bytes_in(keepers[rank], others))
    for keeper in keepers:
        keeper.close()
    assert {} == mooncake.objects
    assert [True] * 2 == [client.is_closed for client in mooncake.clients]


def test_a_store_that_loses_everything_costs_what_it_had(
    keepers: list[Keeper], mooncake: FakeStore
) -> None:
    """A request that wasn't in host memory any more is a miss, and no slot gets other bytes."""
    keeper, slots, others = keepers[0], torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS)
    saved = []
    for number in range(6):
        fill(keeper, slots, number)
        saved.append((bytes_in(keeper, slots), keeper.save((f"r{number}", slots))))
    mooncake.objects.clear()
    for number, (expected, backup) in enumerate(saved):
        fill(keeper, others, 100)
        before = bytes_in(keeper, others)
        try:
            keeper.restore((f"r{number}", others), backup)
        except KvtideError:
            assert torch.equal(before, bytes_in(keeper, others))
        else:
            assert torch.equal(expected, bytes_in(keeper, others))
    missing = keeper.counters.failed_restores["missing"]
    assert 6 == missing + keeper.counters.restores
    assert missing >= 4


def test_the_disk_comes_first_and_each_rank_has_a_part_of_its_limit(
    mooncake: FakeStore, tmp_path: Path
) -> None:
    """Mooncake isn't asked while the disk takes all."""
    limit_bytes = 2 * 3 * (TOKENS * TOKEN_BYTES + 4096)
    below = Below(tmp_path / "kv", limit_bytes, MOONCAKE, 7.0)
    ranks = [keeper_with(below, 2) for _ in range(2)]
    slots = torch.arange(TOKENS)
    backups = [ranks[0].save((f"r{number}", slots)) for number in range(4)]
    assert {} == mooncake.objects
    assert list((tmp_path / "kv" / "retracted-0").rglob("*.safetensors"))
    for backup in backups:
        ranks[0].discard(backup)
    assert re.search(", below it disk up to .* tokens, then a Mooncake store$", coverage(ranks[0]))
    for keeper in ranks:
        store = keeper.store
        assert store is not None
        assert store.disk is not None
        assert limit_bytes // 2 == store.disk.stats.limit_bytes
        assert store.spill is not None
        assert 7.0 == store.spill._deadline_s
        keeper.close()


@pytest.mark.parametrize("has_disk", [True, False])
def test_a_store_that_cannot_be_joined_is_a_warning(
    has_disk: bool, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is used all the same."""

    def refuse(settings: MooncakeSettings) -> None:
        raise UsageError(f"mooncake tier: no master at {settings.master}")

    monkeypatch.setattr(opening, "check_mooncake", refuse)
    disk_dir = tmp_path / "kv" if has_disk else None
    with closing(keeper_with(Below(disk_dir, 1 << 20, MOONCAKE))) as keeper:
        assert keeper.store is not None
        assert (keeper.store.disk is None) != has_disk
        assert keeper.store.mooncake is None
    assert {"kvtide goes on without a tier: mooncake tier: no master at 127.0.0.1:50051"} == set(
        warnings
    )


def test_a_folder_that_cannot_be_used_leaves_mooncake(
    mooncake: FakeStore, tmp_path: Path, warnings: list[str]
) -> None:
    """The warning names the folder once."""
    (tmp_path / "file").touch()
    with closing(keeper_with(Below(tmp_path / "file", None, MOONCAKE))) as keeper:
        assert keeper.store is not None
        assert keeper.store.mooncake is not None
    (said,) = warnings
    assert str(tmp_path / "file") in said


def test_whoever_was_saved_comes_back_from_a_full_disk(tmp_path: Path) -> None:
    """Arena and disk are full, and those who were saved first come back first.

    The request that finds both full is refused, and costs nobody else anything.
    """
    slots, others = torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS)
    with closing(keeper_with(Below(tmp_path / "kv", 4 * 3 * 4096))) as keeper:
        saved: list[tuple[str, torch.Tensor, Backup]] = []
        while not keeper.counters.refused_saves["arena_full"]:
            name = f"r{len(saved)}"
            fill(keeper, slots, len(saved))
            with suppress(ArenaFull):
                saved.append((name, bytes_in(keeper, slots), keeper.save((name, slots))))
        assert len(saved) >= 4
        for name, expected, backup in saved:
            keeper.restore((name, others), backup)
            assert torch.equal(expected, bytes_in(keeper, others))


class HungDisk:
    """Disks that may hang: calls begin, and end only when the disk answers again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        for method in ("put", "get"):
            monkeypatch.setattr(DiskTier, method, self._waiting(getattr(DiskTier, method)))

    def hang(self, keeper: Keeper) -> None:
        """From now on no call ends, and the keeper waits for a moment only."""
        assert keeper.spill is not None
        keeper.spill._deadline_s = 0.05
        self.answers.clear()

    def answer(self, keeper: Keeper) -> None:
        """Calls end again, and all that are under way have."""
        assert keeper.spill is not None
        keeper.spill._deadline_s = PATIENT_S
        self.answers.set()
        settled(keeper)

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*arguments: Any) -> Any:
            self.answers.wait()
            return call(*arguments)

        return wait_and_call


@pytest.fixture
def hung_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    """A disk that a test may hang; in the end it answers."""
    disk = HungDisk(monkeypatch)
    yield disk
    disk.answers.set()


def settled(keeper: Keeper) -> None:
    """Takes steps until nothing moves any more."""
    spill = keeper.spill
    assert spill is not None
    for _ in range(STEPS):
        keeper.read_ahead([])
        if not spill._moving:
            return
        time.sleep(0.001)
    raise AssertionError("a move doesn't end")


def test_a_step_waits_once_for_a_disk_that_hangs(hung_disk: HungDisk, tmp_path: Path) -> None:
    """Requests without room are refused, those in host memory come back, and the disk may recover.

    A step that waits for the disk itself would never end here.
    """
    below = Below(tmp_path / "kv", 1 << 20, wait_s=PATIENT_S)
    slots, others = torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS)
    with closing(keeper_with(below)) as keeper:
        assert keeper.spill is not None
        hung_disk.hang(keeper)
        saved = []
        for number in range(2):
            fill(keeper, slots, number)
            saved.append((bytes_in(keeper, slots), keeper.save((f"r{number}", slots))))
        with pytest.raises(ArenaFull):
            keeper.save(("r2", slots))
        waited = keeper.spill.stats.waited_seconds
        for number in range(3, 6):
            with pytest.raises(ArenaFull):
                keeper.save((f"r{number}", slots))
        assert waited == keeper.spill.stats.waited_seconds
        assert 4 == keeper.counters.refused_saves["arena_full"]
        hung_disk.answer(keeper)
        for number in range(2, 6):
            fill(keeper, slots, number)
            saved.append((bytes_in(keeper, slots), keeper.save((f"r{number}", slots))))
        for number, (expected, backup) in enumerate(saved):
            keeper.restore((f"r{number}", others), backup)
            assert torch.equal(expected, bytes_in(keeper, others))
        assert 0 == keeper.arena.used_bytes


def test_a_request_on_a_disk_that_hangs_is_lost_and_the_step_goes_on(
    hung_disk: HungDisk, tmp_path: Path
) -> None:
    """It is computed again, or ends; nothing has written its slots."""
    below = Below(tmp_path / "kv", 1 << 20, wait_s=PATIENT_S)
    slots, others = torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS)
    with closing(keeper_with(below)) as keeper:
        assert keeper.spill is not None
        backups = [keeper.save((f"r{number}", slots)) for number in range(6)]
        settled(keeper)
        hung_disk.hang(keeper)
        fill(keeper, others, 100)
        before = bytes_in(keeper, others)
        with pytest.raises(SnapshotMiss):
            keeper.restore(("r0", others), backups[0])
        for number in (1, 2):
            keeper.read_ahead(backups[number:])
            with pytest.raises((SnapshotMiss, ArenaFull)):
                keeper.restore((f"r{number}", others), backups[number])
        assert torch.equal(before, bytes_in(keeper, others))
        hung_disk.answer(keeper)
        for number in (3, 4, 5):
            keeper.restore((f"r{number}", others), backups[number])
        assert 0 == keeper.arena.used_bytes


def test_with_nothing_below_a_full_arena_refuses(warnings: list[str]) -> None:
    """Nothing is opened, and nothing is said."""
    with closing(keeper_with(Below())) as keeper:
        slots = torch.arange(TOKENS)
        backups = [keeper.save((f"r{number}", slots)) for number in range(2)]
        with pytest.raises(ArenaFull):
            keeper.save(("r2", slots))
        for backup in backups:
            keeper.discard(backup)
    assert [] == warnings


def test_settings_name_what_is_below() -> None:
    """Each variable arrives in its field, and nothing is below by default."""
    assert Below() == below_of({})
    found = below_of(
        {
            "KVTIDE_DISK_DIR": "/kv",
            "KVTIDE_DISK_MEMORY": "2GiB",
            "KVTIDE_MOONCAKE": "10.0.0.1:50051",
            "KVTIDE_TIER_SECONDS": "0.5",
        }
    )
    assert Below(Path("/kv"), 2 << 30, MooncakeSettings("10.0.0.1:50051"), 0.5) == found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVTIDE_DISK_MEMORY", "2GiB", "is the limit of a folder; name it with KVTIDE_DISK_DIR"),
        ("KVTIDE_MOONCAKE", "nowhere", "'nowhere'"),
        ("KVTIDE_TIER_SECONDS", "0", "'0' isn't a number of seconds above 0 and up to 3600"),
        ("KVTIDE_TIER_SECONDS", "-1", "'-1' isn't a number"),
        ("KVTIDE_TIER_SECONDS", "nan", "'nan' isn't a number"),
        ("KVTIDE_TIER_SECONDS", "inf", "'inf' isn't a number"),
        ("KVTIDE_TIER_SECONDS", "5s", "'5s' isn't a number of seconds .* such as 5$"),
    ],
)
def test_a_hostile_value_is_refused_by_name(name: str, value: str, said: str) -> None:
    """The message begins with the variable."""
    with pytest.raises(UsageError, match=f"^{name}.*{said}"):
        below_of({name: value})
