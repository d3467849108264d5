"""vLLM's blocks in a real store: below kvtide's own host memory, and below vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import Cluster

from kvtide.plugin.vllm.settings import read_settings
from kvtide.plugin.vllm.tiers_below import open_below
from support.block_rank import KEYS, NAMES, BlockRank
from support.fake_vllm import config_for
from support.stand_in_vllm import stand_in_vllm

ROWS, ROW_BYTES, POISON = 4, 70_000, 0x5A


@pytest.fixture
def ranks(cluster: Cluster, client: Any) -> Iterator[list[BlockRank]]:
    """Two machines' ranks, whose blocks go to the store."""
    settings = read_settings({"mooncake": cluster.address})
    with ExitStack() as opened:
        yield [
            opened.enter_context(closing(BlockRank(open_below(settings, 0, 1), seed)))
            for seed in (1, 2)
        ]
    client.remove_by_regex(".*", True)


def flip_a_bit(client: Any, name: str) -> None:
    """Changes a bit of an object's last page that has content."""
    content = bytearray(client.get(name))
    content[-4096] ^= 1
    assert 0 == client.remove(name, True)
    assert 0 == client.put(name, bytes(content))


class TestBelowKvtidesHostMemory:
    def test_another_machine_gets_every_byte_and_none_that_is_damaged(
        self, ranks: list[BlockRank], client: Any
    ) -> None:
        here, there = ranks
        assert [False] * 3 == there.found(KEYS)
        assert 2 == here.save(KEYS[:2]).counts["written_blocks"]
        assert [True, True, False] == there.found(KEYS)
        assert {KEYS[2]} == there.fetch(KEYS).missing
        there.load(KEYS[:2], 4)
        assert [here.block(1), here.block(2)] == [there.block(4), there.block(5)]

        assert there.below.mooncake is not None
        flip_a_bit(client, there.below.mooncake._name_of(NAMES.key_of(KEYS[0].hex())))
        report = there.fetch(KEYS[:2])
        assert ({KEYS[0]}, 1) == (report.missing, report.counts["damaged_blocks"])
        assert [False, True] == there.found(KEYS[:2])


class Machine:
    """A scheduler with vLLM's host memory, and the secondary tier that vLLM makes there."""

    def __init__(self, folder: Path, address: str, fill: int) -> None:
        from kvtide.plugin.vllm.secondary import _CONFIG, KvtideTier

        self.memory = bytearray([fill]) * (ROWS * ROW_BYTES)
        config = config_for(folder)
        config.attention_config = "attention"  # type: ignore[attr-defined]
        group = SimpleNamespace(tokens_per_block=16, layer_names=["layers.0"])
        cache = SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)
        about = SimpleNamespace(groups=[group], cache=cache, kv_cache_layout="LBHNC")
        of_group = SimpleNamespace(kv_cache_spec="16 tokens of 35,000 bytes")
        caches = SimpleNamespace(kv_cache_groups=[of_group])
        before = _CONFIG.set((config, caches))
        self.tier: Any = KvtideTier(
            SimpleNamespace(config=about),
            memoryview(self.memory).cast("b", (ROWS, ROW_BYTES)),
            "kvtide",
            mooncake=address,
            weights="r1",
        )
        _CONFIG.reset(before)
        self._asker = SimpleNamespace(req_id="")
        self._job_id = 0

    def row(self, number: int) -> bytearray:
        """The bytes of a row of host memory."""
        return self.memory[number * ROW_BYTES : (number + 1) * ROW_BYTES]

    def found(self, keys: Sequence[bytes]) -> list[str]:
        """What a new request is told of chunks."""
        self._asker.req_id += "r"
        while "RETRY" in (found := [self.tier.lookup(key, self._asker) for key in keys]):
            self.tier.on_schedule_end(None)
        return found

    def move(self, submit: Any, keys: Sequence[bytes], rows: Sequence[int]) -> Any:
        """A move, once it has ended."""
        self._job_id += 1
        submit(SimpleNamespace(job_id=self._job_id, keys=keys, chunk_ids=rows))
        while self.tier.has_pending_work():
            if ended := list(self.tier.get_finished_jobs()):
                return ended[0]
        raise AssertionError("a move that nobody heard of")


@pytest.fixture
def machines(cluster: Cluster, client: Any, tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines with the same model."""
    with stand_in_vllm():
        made = [Machine(tmp_path, cluster.address, fill) for fill in (1, POISON)]
        yield made
        for machine in made:
            machine.tier.shutdown()
    client.remove_by_regex(".*", True)


class TestBelowVllmsHostMemory:
    def test_another_machine_gets_every_byte_and_none_that_is_damaged(
        self, machines: list[Machine], client: Any
    ) -> None:
        here, there = machines
        here.memory[:ROW_BYTES] = bytes(number % 251 for number in range(ROW_BYTES))
        assert ["MISS"] * 3 == there.found(KEYS)
        assert here.move(here.tier.submit_store, KEYS[:2], [0, 1]).success
        assert ["HIT", "HIT", "MISS"] == there.found(KEYS)
        ended = there.move(there.tier.submit_load, KEYS[:2], [3, 2])
        assert (True, KEYS[:2]) == (ended.success, ended.successful_keys)
        assert [here.row(0), here.row(1)] == [there.row(3), there.row(2)]
        assert {POISON} == {*there.row(0), *there.row(1)}

        name = there.tier._below.mooncake._name_of(there.tier._name_of(KEYS[0]))
        flip_a_bit(client, name)
        ended = there.move(there.tier.submit_load, KEYS[:2], [0, 1])
        assert (False, KEYS[1:2]) == (ended.success, ended.successful_keys)
        assert ({POISON}, here.row(1)) == ({*there.row(0)}, there.row(1))
        assert 1 == there.tier._moves.take_counts()["damaged_blocks"]
        assert ["MISS", "HIT"] == there.found(KEYS[:2])

    def test_after_a_reset_nothing_from_before_is_used(self, machines: list[Machine]) -> None:
        here, there = machines
        here.move(here.tier.submit_store, KEYS[:1], [0])
        assert ["HIT"] == there.found(KEYS[:1])
        there.tier.drain_jobs()
        assert ["MISS"] == there.found(KEYS[:1])


def test_without_its_nodes_the_store_has_nothing(cluster: Cluster, ranks: list[BlockRank]) -> None:
    """A block is a miss, whatever the master still says of it."""
    here, there = ranks
    here.save(KEYS[:1])
    for number in range(2):
        cluster.kill(f"node{number}")
    try:
        report = there.fetch(KEYS[:1])
    finally:
        cluster.wait_for_nodes(0)
        for number in range(2):
            cluster.start_node(number)
        cluster.wait_for_nodes(2)
    assert ({KEYS[0]}, 0) == (report.missing, report.counts["damaged_blocks"])
