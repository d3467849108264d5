"""A Mooncake store below kvtide's own host memory: what one machine saves, another finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.errors import UsageError
from kvtide.plugin.vllm.books import BlockBooks
from kvtide.plugin.vllm.messages import Start
from kvtide.plugin.vllm.settings import OffloadSettings, read_settings
from kvtide.plugin.vllm.tiers_below import open_below
from kvtide.tier.mooncake_client import TRANSFER_FAILED
from support.block_rank import KEYS, BlockRank
from tier.fake_mooncake import FakeStore

STORE = {"mooncake": "10.0.0.1:50051"}
OpenRank = Callable[..., BlockRank]


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that whoever joins one gets; it isn't tried again, and doesn't rest."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    monkeypatch.setattr("kvtide.tier.retries.WAITS_S", ())
    monkeypatch.setattr("kvtide.tier.retries.REST_S", 0.0)
    return store


@pytest.fixture
def opened(mooncake: FakeStore) -> Iterator[OpenRank]:
    """Opens ranks of different machines, by their seeds and settings."""
    ranks: list[BlockRank] = []

    def open_rank(seed: int, **extra: str) -> BlockRank:
        ranks.append(BlockRank(open_below(read_settings({**STORE, **extra}), 0, 1), seed))
        return ranks[-1]

    yield open_rank
    for rank in ranks:
        rank.close()
    assert all(client.is_closed for client in mooncake.clients)


class TestMooncakeBelow:
    def test_gives_every_byte_of_a_block_to_another_machine(self, opened: OpenRank) -> None:
        here, there = opened(1), opened(2)
        assert [False] * 3 == there.found(KEYS)
        assert 2 == here.save(KEYS[:2]).counts["written_blocks"]

        assert [True, True, False] == there.found(KEYS)
        assert {KEYS[2]} == there.fetch(KEYS).missing
        there.load(KEYS[:2], 4)
        assert [here.block(1), here.block(2)] == [there.block(4), there.block(5)]

    def test_loses_a_damaged_block_once_and_takes_it_again(
        self, opened: OpenRank, mooncake: FakeStore
    ) -> None:
        here, there = opened(1), opened(2)
        here.save(KEYS[:1])
        (content,) = mooncake.objects.values()
        content[-4096] ^= 1
        report = there.fetch(KEYS[:1])
        assert ({KEYS[0]}, 1) == (report.missing, report.counts["damaged_blocks"])
        assert [False] == there.found(KEYS[:1])

        here.save(KEYS[:1])
        assert [True] == there.found(KEYS[:1])
        assert {KEYS[0]} == {*there.fetch(KEYS[:1]).fetched}

    def test_that_is_away_has_nothing_and_comes_back(
        self, opened: OpenRank, mooncake: FakeStore
    ) -> None:
        """First a node, and then the master."""
        here, there = opened(1), opened(2)
        here.save(KEYS[:1])
        mooncake.node_code = TRANSFER_FAILED
        assert {KEYS[0]} == there.fetch(KEYS[:1]).missing
        mooncake.node_code = 0
        mooncake.is_master_away = True
        assert [False] == there.found(KEYS[:1])
        assert {KEYS[0]} == there.fetch(KEYS[:1]).missing
        assert 1 == here.save(KEYS[1:2]).counts["failed_writes"]
        mooncake.is_master_away = False
        assert [True, False, False] == there.found(KEYS)
        assert {KEYS[0]} == {*there.fetch(KEYS[:1]).fetched}

    def test_stands_in_for_a_disk_that_is_damaged(self, opened: OpenRank, tmp_path: Path) -> None:
        """Each block is on the disk, which is nearer, and in the store."""
        rank = opened(1, disk_dir=str(tmp_path), disk_memory="1MiB")
        rank.save(KEYS[:1])
        (path,) = tmp_path.rglob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-4096] ^= 1
        path.write_bytes(content)
        assert {KEYS[0]} == {*rank.fetch(KEYS[:1]).fetched}
        rank.load(KEYS[:1], 4)
        assert rank.block(1) == rank.block(4)

    @pytest.mark.parametrize("disk_memory", [None, "1MiB"])
    def test_has_own_blocks_that_left_host_memory(
        self, opened: OpenRank, tmp_path: Path, disk_memory: str | None
    ) -> None:
        """A scheduler asks no tier for them: it remembers them, with a disk or without."""
        disk = {"disk_dir": str(tmp_path), "disk_memory": disk_memory} if disk_memory else {}
        books, keys = BlockBooks(1), [bytes([number]) for number in range(250)]
        books.open(Start(1, frozenset(), opened(1, **disk).below.block_count(8192)), bytes.hex)
        for key in keys:
            books.begin_save([key])
            books.end_save([key])
            books.end_step()
        assert all(books.knows(key) for key in keys)

    def test_is_named_in_the_line_of_the_log(self, opened: OpenRank, tmp_path: Path) -> None:
        assert "the Mooncake store of 10.0.0.1:50051 below it" == str(opened(1).below)
        both = str(opened(1, disk_dir=str(tmp_path), disk_memory="1MiB").below)
        assert both.endswith(
            "blocks from before, and the Mooncake store of 10.0.0.1:50051 below it"
        )
        assert "no disk below it" == str(open_below(OffloadSettings(), 0, 1))

    def test_that_cant_be_joined_leaves_no_folder_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = read_settings({**STORE, "disk_dir": str(tmp_path), "disk_memory": "1MiB"})

        def refuse(_: object) -> None:
            raise UsageError("no master")

        monkeypatch.setattr("kvtide.tier.mooncake.connect", refuse)
        for _ in range(2):
            with pytest.raises(UsageError, match="no master"):
                open_below(settings, 0, 1)
        assert ["0-of-1-0"] == [path.name for path in (tmp_path / "vllm").iterdir()]
