"""Beginnings of prompts outlive their engine: another one finds their KV in a disk or in Mooncake.

Each answer is compared with the answer of an engine that shares nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.arena import Lease
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import Request, SamplingParams
from kvtide.tier import DiskTier, MooncakeSettings
from kvtide.tier.inspection import inspect_folder
from kvtide.tier.namespace import is_shared
from serve.harness import (
    answers,
    assert_nothing_held,
    check_rows_once,
    end_answers_at,
    tiny,
    token_bytes,
)
from tier.fake_mooncake import FakeStore

CHUNK = 16
MOONCAKE = MooncakeSettings("a:1")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares blocks of a chunk, and lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)
    monkeypatch.setattr("kvtide.serve.prefix._FEW_TOKENS", CHUNK)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that an engine with `mooncake` joins."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    return store


def make_requests(count: int = 3, *, salt: bytes = b"", new_tokens: int = 8) -> list[Request]:
    """Makes requests with one beginning of four chunks, and ends of their own."""
    dice = random.Random(5)
    beginning = [dice.randrange(4, 199) for _ in range(4 * CHUNK)]
    return [
        Request(
            f"r{number}",
            [*beginning, *(dice.randrange(4, 199) for _ in range(5))],
            SamplingParams(new_tokens, temperature=0.9 * (number % 2), seed=number),
            salt=salt,
        )
        for number in range(count)
    ]


def build(
    folder: Path | None, *, source: OpenModel | None = None, pool_tokens: int = 400, **options: Any
) -> Engine:
    """Builds an engine of small chunks and pages, in which answers end by their length alone."""
    defaults: dict[str, Any] = {"host_memory_bytes": 1 << 24, "page_size": 4, "chunk_tokens": CHUNK}
    engine = Engine.build(
        source or tiny(),
        EngineOptions(
            kv_memory_bytes=pool_tokens * token_bytes(tiny()),
            keep_logits=True,
            disk_dir=folder,
            **defaults | options,
        ),
    )
    end_answers_at(engine, [])
    return engine


def answer(engine: Engine, requests: Iterable[Request]) -> list[tuple[object, ...]]:
    """Answers requests one after another, and gives the answers."""
    requests = list(requests)
    for request in requests:
        engine.add(request)
        while engine.has_work:
            engine.step()
    return answers(requests)


@pytest.fixture(scope="module")
def alone() -> list[tuple[object, ...]]:
    """The answers of an engine that shares nothing."""
    with pytest.MonkeyPatch.context() as patch:
        check_rows_once(patch)
        engine = build(None, share_prefixes=False)
        found = answer(engine, make_requests())
        engine.close()
    return found


def leave(engine: Engine, requests: Iterable[Request]) -> list[tuple[object, ...]]:
    """Answers requests, and ends the engine as a run does; gives the answers."""
    found = answer(engine, requests)
    assert 0 == engine.suspend()
    assert_nothing_held(engine)
    engine.close()
    return found


def shared_files(folder: Path) -> list[Path]:
    """The files of blocks in a folder. Nothing else may be there after the requests have ended."""
    found = [file for file in inspect_folder(folder) if file.path.endswith(".safetensors")]
    assert all(file.key is not None and is_shared(file.key) for file in found)
    return [folder / file.path for file in found]


def test_a_later_engine_takes_a_prefix_from_the_disk(
    tmp_path: Path, alone: list[tuple[object, ...]]
) -> None:
    """The report says so, and the answers have the same bits as if they were computed alone."""
    assert alone == leave(build(tmp_path / "kv"), make_requests())
    assert 4 + 3 == len(shared_files(tmp_path / "kv"))  # and what each has of its own
    second = build(tmp_path / "kv")
    assert alone == answer(second, make_requests())
    assert {"disk": 4 * CHUNK, "device": 8 * CHUNK} == second.stats.cached_tokens
    assert (4, 0) == (second.stats.tiers["disk"].hits, second.stats.tier_wait_seconds)
    second.suspend()
    assert_nothing_held(second)
    second.close()
    assert 4 + 3 == len(shared_files(tmp_path / "kv"))


def test_what_the_disk_has_is_not_written_again(tmp_path: Path) -> None:
    """A block that leaves the device a second time finds its bytes there."""
    leave(build(tmp_path / "kv"), make_requests())
    second = build(tmp_path / "kv")
    answer(second, make_requests())
    second.suspend()
    writes = second.stats.tiers["disk"].writes
    second.close()
    assert 0 == writes


def test_an_engine_elsewhere_takes_a_prefix_from_mooncake(
    mooncake: FakeStore, alone: list[tuple[object, ...]]
) -> None:
    """It needs nothing of the first engine's machine."""
    assert alone == leave(build(None, mooncake=MOONCAKE), make_requests())
    second = build(None, mooncake=MOONCAKE)
    assert alone == answer(second, make_requests())
    assert 4 * CHUNK == second.stats.cached_tokens["mooncake"]
    second.close()
    assert 4 + 3 == len(mooncake.objects)


def test_engines_share_a_prefix_while_both_run(mooncake: FakeStore) -> None:
    """What one has evicted the other finds, without any end."""
    first, second = (
        build(None, source=open_model("tiny-random", dtype="float32"), mooncake=MOONCAKE)
        for _ in range(2)
    )
    answer(first, make_requests(1))
    first.scheduler.prefixes.blocks.leave()
    assert first.store.spill is not None
    first.store.spill.leave()
    (request,) = make_requests(1)
    answer(second, [request])
    assert request.cached_tokens == second.stats.cached_tokens["mooncake"] > 0
    for engine in (first, second):
        engine.close()


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "salt": {"salt": b"another's"},
    "mode": {"exact": False},
}


@pytest.mark.parametrize("change", [*CHANGES, "tenant", "weights", "layout", "numerics"])
def test_a_prefix_of_another_namespace_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Neither another tenant's, nor that of other weights, another mode, or another machine."""
    leave(build(tmp_path / "kv", salt=b"ours"), make_requests(salt=b"tenant"))
    if change == "weights":
        monkeypatch.setitem(vars(tiny()), "identity", "another model")
    if change == "layout":
        monkeypatch.setattr("kvtide.layout.Geometry.fingerprint", b"another layout")
    if change == "numerics":
        monkeypatch.setattr("torch.__version__", "another torch")
    options = {"salt": b"ours"} | CHANGES.get(change, {})
    second = build(tmp_path / "kv", **options)
    request = make_requests(1, salt=b"another" if change == "tenant" else b"tenant")[0]
    answer(second, [request])
    second.close()
    assert (4 * CHUNK if change == "nothing" else 0) == request.cached_tokens


@pytest.mark.parametrize("chunk_tokens", [8, 3 * CHUNK, 24])
def test_engines_with_other_chunks_share_a_prefix(
    tmp_path: Path, alone: list[tuple[object, ...]], chunk_tokens: int
) -> None:
    """A prompt's token has the same bits however it is cut, so the answers are the same, too."""
    leave(build(tmp_path / "kv", chunk_tokens=chunk_tokens), make_requests())
    second = build(tmp_path / "kv")
    assert alone == answer(second, make_requests())
    assert 4 * CHUNK <= second.stats.cached_tokens["disk"]
    second.close()


def test_a_next_turn_goes_on_where_the_last_one_ended_before_a_restart(tmp_path: Path) -> None:
    """In the middle of a block and of a page; its answer has the bits that it has alone."""
    (first,) = make_requests(1)
    leave(build(tmp_path / "kv"), [first])
    prompt = [*first.prompt_ids, *first.output_ids, 7, 8, 9]
    second, turns = build(tmp_path / "kv"), [Request(name, prompt) for name in "ab"]
    single = build(None, share_prefixes=False)
    assert answer(single, turns[:1])[0][1:] == answer(second, turns[1:])[0][1:]
    assert {"disk": len(first.prompt_ids)} == second.stats.cached_tokens
    for engine in (second, single):
        engine.close()


def test_a_block_without_room_to_come_is_computed_at_once(
    tmp_path: Path, alone: list[tuple[object, ...]]
) -> None:
    """The host memory is all in use. So nobody waits for the block, nor for any other later."""
    leave(build(tmp_path / "kv"), make_requests())
    second = build(tmp_path / "kv")
    lease = Lease(second.tide.arena)
    lease.extend(second.tide.arena.free_count)
    assert alone == answer(second, make_requests())
    lease.release()
    assert "disk" not in second.stats.cached_tokens
    assert {"disk"} == set(second.stats.tiers)
    seeker = second.scheduler.prefixes._finder._seeker
    assert seeker is not None
    assert float("-inf") == seeker._rests_until
    second.close()


@pytest.mark.parametrize("is_same", [True, False])
def test_what_another_computation_left_of_a_request_is_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    """In exact mode its KV may have other bits: the request is computed anew, on each machine."""
    first, (left,) = build(tmp_path / "kv"), make_requests(1)
    left.key = "0" * 32
    first.add(left)
    for _ in range(6):
        first.step()
    assert 1 == first.suspend()
    first.close()
    monkeypatch.setattr("torch.__version__", torch.__version__ if is_same else "another torch")
    second, requests = build(tmp_path / "kv"), make_requests(2)
    requests[0].key = left.key
    answer(second, requests)
    place = {"device": 4 * CHUNK}
    assert (int(is_same), place) == (second.stats.resumes, second.stats.cached_tokens)
    second.close()


def test_two_salts_are_not_one(tmp_path: Path) -> None:
    """Where the operator's secret ends and the tenant's begins is part of the key."""
    leave(build(tmp_path / "kv", salt=b"ab"), make_requests(1, salt=b"c"))
    second = build(tmp_path / "kv", salt=b"a")
    (request,) = make_requests(1, salt=b"bc")
    answer(second, [request])
    second.close()
    assert 0 == request.cached_tokens


@pytest.mark.parametrize("place", [-4097, 200])
def test_a_flipped_bit_is_a_miss(
    tmp_path: Path, alone: list[tuple[object, ...]], place: int
) -> None:
    """In the KV and in the header: the block is computed, to the same bits."""
    leave(build(tmp_path / "kv"), make_requests())
    for path in shared_files(tmp_path / "kv"):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(bytes(content))
    second = build(tmp_path / "kv")
    assert alone == answer(second, make_requests())
    assert "disk" not in second.stats.cached_tokens
    counts = second.stats.tiers["disk"]
    assert counts.damaged + counts.misses["gone"] > 0
    assert_nothing_held(second)
    second.close()


def test_blocks_in_the_wrong_files_are_misses(
    tmp_path: Path, alone: list[tuple[object, ...]]
) -> None:
    """Whole files, each under the name of another."""
    leave(build(tmp_path / "kv"), make_requests())
    paths = shared_files(tmp_path / "kv")
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    second = build(tmp_path / "kv")
    assert alone == answer(second, make_requests())
    assert "disk" not in second.stats.cached_tokens
    second.close()


def test_blocks_leave_the_disk_for_requests(tmp_path: Path) -> None:
    """The disk is full of blocks, and requests that are retracted lose nothing for that."""
    block_bytes = 1 << 16
    options: dict[str, Any] = {
        "pool_tokens": 150,
        "host_memory_bytes": 2 * block_bytes,
        "disk_memory_bytes": 12 * (block_bytes + 4096),
    }
    first, dice = build(tmp_path / "kv", **options), random.Random(1)
    for number in range(8):
        prompt = [dice.randrange(4, 199) for _ in range(100)]
        answer(first, [Request(str(number), prompt, SamplingParams(2))])
    leave(first, [])
    before = len(shared_files(tmp_path / "kv"))
    second, requests = build(tmp_path / "kv", **options), make_requests(12, new_tokens=60)
    for number, request in enumerate(requests):
        request.prompt_ids = [number + 4, *request.prompt_ids[1:40]]
        second.add(request)
    steps = 0
    while second.has_work:
        steps += 1
        if steps % 2 == 0 and len(second.scheduler.running) > 1:
            second.scheduler.retract(second.scheduler.running[0])
        second.step()
        assert second.stats.disk_bytes <= second.stats.disk_limit_bytes
    assert second.stats.spills > 0
    assert (0, 0) == (second.stats.recomputed_tokens, second.scheduler.stats.missing)
    assert isinstance(second.store.disk, DiskTier)
    assert before > 3
    assert second.store.disk.stats.evicted > 0
    second.close()


def test_what_no_disk_has_room_for_is_dropped(tmp_path: Path) -> None:
    """The limits hold at the end, too, and the newest blocks are those that are left."""
    engine = build(tmp_path / "kv", pool_tokens=4000, disk_memory_bytes=200_000)
    dice = random.Random(2)
    for number in range(12):
        prompt = [dice.randrange(4, 199) for _ in range(70)]
        answer(engine, [Request(str(number), prompt, SamplingParams(2))])
    engine.suspend()
    stats = engine.stats
    engine.close()
    assert stats.disk_bytes <= stats.peak_disk_bytes <= 200_000
    left = shared_files(tmp_path / "kv")
    assert 0 < len(left) < 48
    second = build(tmp_path / "kv", disk_memory_bytes=200_000)
    again = Request("11", prompt, SamplingParams(2))
    answer(second, [again])
    second.close()
    assert 4 * CHUNK == again.cached_tokens


def hang_disks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lets disks say what they have only after the event is set."""
    gate, contains = threading.Event(), DiskTier.contains

    def hang(tier: DiskTier, key: str) -> bool:
        gate.wait()
        return contains(tier, key)

    monkeypatch.setattr(DiskTier, "contains", hang)
    return gate


def test_a_hung_tier_stalls_nobody(
    tmp_path: Path, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for a prefix and never answers while requests are answered."""
    leave(build(tmp_path / "kv"), make_requests())
    gate = hang_disks(monkeypatch)
    monkeypatch.setattr("kvtide.serve.seeker._PATIENCE_S", 0.05)
    second = build(tmp_path / "kv")
    try:
        assert alone == answer(second, make_requests())
        assert "disk" not in second.stats.cached_tokens
        assert 0 == second.stats.tier_wait_seconds
    finally:
        gate.set()
    second.close()


def test_reads_that_hang_stall_nobody(
    tmp_path: Path, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block was found, and doesn't come: it is computed, and what others compute goes on."""
    leave(build(tmp_path / "kv"), make_requests())
    gate, get, asked = threading.Event(), DiskTier.get, []

    def hang(tier: DiskTier, key: str, make_room: Any) -> Any:
        asked.append(key)
        if len(asked) > 4:  # after the seals of the four blocks
            gate.wait()
        return get(tier, key, make_room)

    monkeypatch.setattr(DiskTier, "get", hang)
    monkeypatch.setattr("kvtide.serve.seeker._PATIENCE_S", 0.05)
    second = build(tmp_path / "kv")
    try:
        assert alone == answer(second, make_requests())
        assert len(asked) > 4
    finally:
        gate.set()
    second.close()


def test_requests_go_on_while_another_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for a tier that hangs, and the other gets tokens in each step meanwhile."""
    first = Request("first", [9] * 10, SamplingParams(30))
    engine = build(tmp_path / "kv")
    engine.add(first)
    engine.step()
    gate = threading.Event()
    monkeypatch.setattr(DiskTier, "contains", lambda *_: gate.wait())
    monkeypatch.setattr("kvtide.serve.seeker._PATIENCE_S", 1e9)
    (waiting,) = make_requests(1)
    engine.add(waiting)
    for count in range(2, 12):
        engine.step()
        assert (count, 0) == (len(first.output_ids), waiting.stored)
    gate.set()
    engine.close()


def test_a_request_that_ends_while_it_waits_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted while a tier is asked for its prefix."""
    leave(build(tmp_path / "kv"), make_requests())
    gate = hang_disks(monkeypatch)
    engine = build(tmp_path / "kv")
    (request,) = make_requests(1)
    engine.add(request)
    engine.scheduler.prefixes.read_ahead(request)
    engine.abort(request.id)
    gate.set()
    assert not engine.has_work
    assert_nothing_held(engine)
    seeker = engine.scheduler.prefixes._finder._seeker
    assert seeker is not None
    assert not seeker._asked
    engine.close()
