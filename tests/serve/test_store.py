"""With a tier below host memory, KV that has no room in host memory isn't computed again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.errors import SnapshotMiss, UsageError
from kvtide.serve import progress
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import open_model
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.sampling import Sampler
from kvtide.tier import MooncakeSettings, Spill
from serve.harness import answers, check_rows_once, poison_released, run_all, tiny, token_bytes
from tier.fake_mooncake import FakeStore

BLOCK_BYTES = 1 << 16
SETTINGS = MooncakeSettings("a:1")


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that an engine with `mooncake` joins."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    return store


def make_requests() -> list[Request]:
    """Makes requests that all want to run at once, and take about a block each."""
    numbers = random.Random(1)
    return [
        Request(
            f"r{number}",
            [numbers.randrange(4, 260) for _ in range(numbers.randint(20, 50))],
            SamplingParams(max_new_tokens=40),
        )
        for number in range(16)
    ]


def build(folder: Path | None, **options: Any) -> Engine:
    """Builds an engine whose pool has room for three requests, and the arena for two.

    It shares no prefixes, which would stay in the tiers: here all that a tier has is a request's.
    """
    memory = EngineOptions(
        share_prefixes=False,
        kv_memory_bytes=280 * token_bytes(tiny()),
        host_memory_bytes=2 * BLOCK_BYTES,
        disk_dir=folder,
        keep_logits=True,
    )
    return Engine.build(tiny(), replace(memory, **options))


def go(engine: Engine, *, retract_every: int) -> list[Request]:
    """Answers the requests, and retracts the oldest that runs at some steps."""
    requests = make_requests()
    for request in requests:
        engine.add(request)
    number = 0
    while engine.has_work:
        number += 1
        if number % retract_every == 0 and len(engine.scheduler.running) > 1:
            engine.scheduler.retract(engine.scheduler.running[0])
        engine.step()
        assert engine.tide.arena.used_bytes <= engine.tide.arena.limit_bytes
    return requests


def test_kv_without_room_in_host_memory_comes_back_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed again, the answers have the same bits, and nothing stays on the disk."""
    roomy = Engine.build(tiny(), EngineOptions(keep_logits=True), make_requests())
    expected = make_requests()
    run_all(roomy, expected)
    roomy.close()
    engine = build(tmp_path / "kv")
    with monkeypatch.context() as patch:
        poison_released(engine, patch)
        requests = go(engine, retract_every=2)
    stats = engine.stats
    engine.close()
    assert answers(expected) == answers(requests)
    assert (0, 0) == (stats.recomputed_tokens, engine.scheduler.stats.arena_full)
    disk = stats.tiers["disk"]
    assert 0 < disk.down_bytes
    assert 0 < disk.up_bytes
    assert (disk.writes, 0) == (stats.spills, disk.damaged)
    assert 0 < stats.peak_disk_bytes <= stats.disk_limit_bytes
    assert not list((tmp_path / "kv").glob("??/*.safetensors"))


@pytest.mark.parametrize("disk_bytes", [None, 0, BLOCK_BYTES])
def test_kv_without_room_in_host_memory_comes_back_from_mooncake(
    tmp_path: Path, mooncake: FakeStore, disk_bytes: int | None
) -> None:
    """The same below host memory, and below a disk that is too small."""
    expected = make_requests()
    roomy = Engine.build(tiny(), EngineOptions(keep_logits=True), expected)
    run_all(roomy, expected)
    roomy.close()
    folder = None if disk_bytes is None else tmp_path / "kv"
    engine = build(folder, disk_memory_bytes=disk_bytes, mooncake=SETTINGS)
    written: set[str] = set()
    mooncake.before_end = written.add
    requests = go(engine, retract_every=2)
    stats = engine.stats
    engine.close()
    assert answers(expected) == answers(requests)
    assert written
    assert len(written) <= stats.tiers["mooncake"].writes
    assert (0, 0) == (stats.recomputed_tokens, engine.scheduler.stats.arena_full)
    assert {} == mooncake.objects


def test_without_a_disk_such_kv_is_computed_again() -> None:
    """The same run without a disk fills the arena, so the test above does use the disk."""
    engine = build(None)
    go(engine, retract_every=2)
    assert engine.scheduler.stats.arena_full > 0
    assert engine.stats.recomputed_tokens > 0
    engine.close()


def test_file_that_vanishes_costs_one_request_its_kv(tmp_path: Path) -> None:
    """Snapshots without a file are computed again, and all answers are right."""
    expected, requests = make_requests(), make_requests()
    roomy = Engine.build(tiny(), EngineOptions(keep_logits=True), expected)
    run_all(roomy, expected)
    roomy.close()
    engine = build(tmp_path / "kv")
    for request in requests:
        engine.add(request)
    removed = number = 0
    while engine.has_work:
        number += 1
        if number % 2 == 0 and len(engine.scheduler.running) > 1:
            engine.scheduler.retract(engine.scheduler.running[0])
        if engine.scheduler.stats.missing < 3:  # most come back from host memory, without the file
            for path in (tmp_path / "kv").glob("??/*.safetensors"):
                path.unlink()
                removed += 1
        engine.step()
    engine.close()
    assert answers(expected) == answers(requests)
    assert 3 <= removed
    assert engine.scheduler.stats.missing > 0
    assert 0 == engine.tide.arena.used_bytes


def test_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error names the folder, and the model can be used by itself afterwards."""
    source, tokens = open_model("tiny-random"), torch.tensor([[5, 6, 7]])
    expected = source.model(tokens).logits
    options = EngineOptions(kv_memory_bytes=280 * token_bytes(source))
    with pytest.raises(UsageError, match="cannot use the folder"):
        Engine.build(source, replace(options, disk_dir=tmp_path / "no" / "parent"))
    assert torch.equal(expected, source.model(tokens).logits)


# ---- another process goes on ------------------------------------------------------------


def make_named() -> list[Request]:
    """Makes the requests with keys, so that a later engine can go on with them; some sample."""
    requests = make_requests()
    for number, request in enumerate(requests):
        request.key = f"{number:032x}"
        if number % 2:
            request.params = SamplingParams(max_new_tokens=40, temperature=0.9, seed=number)
    return requests


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[object, ...]]:
    """The answers of a run with room for all."""
    requests = make_named()
    engine = Engine.build(tiny(), EngineOptions(keep_logits=True), requests)
    run_all(engine, requests)
    engine.close()
    return answers(requests)


def begin(engine: Engine, steps: int) -> list[Request]:
    """Takes some steps; gives the requests that have ended."""
    for request in make_named():
        engine.add(request)
    ended: list[Request] = []
    for number in range(steps):
        if number % 2 and len(engine.scheduler.running) > 1:
            engine.scheduler.retract(engine.scheduler.running[0])
        ended += engine.step()
    return ended


def finish(engine: Engine, ended: Sequence[Request]) -> list[tuple[object, ...]]:
    """Answers what has not ended; gives all answers in order."""
    done = {request.id for request in ended}
    left = [request for request in make_named() if request.id not in done]
    run_all(engine, left)
    order = [request.id for request in make_named()]
    return answers(sorted([*ended, *left], key=lambda request: order.index(request.id)))


@pytest.mark.parametrize("steps", [1, 5, 20, 45, 60])
def test_a_later_engine_goes_on_where_one_was_suspended(
    tmp_path: Path, undisturbed: list[tuple[object, ...]], steps: int
) -> None:
    """The answers have the same bits, and no token is computed again."""
    first = build(tmp_path / "kv")
    ended = begin(first, steps)
    counted = first.stats.new_tokens
    saved = first.suspend()
    first.close()
    second = build(tmp_path / "kv")
    assert undisturbed == finish(second, ended)
    assert saved > 0
    total = sum(len(str(answer[1]).split(",")) for answer in undisturbed)
    assert total == counted + second.stats.new_tokens
    assert 0 == second.stats.recomputed_tokens
    second.close()
    assert not list((tmp_path / "kv").glob("??/*.safetensors"))


def test_only_an_engine_that_computes_is_in_a_hurry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request's tiers may cost its engine: a second if others wait, else the deadline."""
    asked: list[float | None] = []

    def find(_: Spill, name: str, at_most_s: float | None = None) -> None:
        asked.append(at_most_s)

    monkeypatch.setattr(Spill, "find", find)
    engine = build(tmp_path / "kv")
    first, second, third, *_ = make_named()
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.add(third)
    engine.close()
    assert [None, None, 1.0] == asked


def test_a_later_engine_goes_on_after_a_sudden_end(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    """What was on the disk at that moment is enough; the other requests start anew."""
    first = build(tmp_path / "kv")
    ended = begin(first, 30)
    with suppress(shutil.Error):  # a file that is written meanwhile may get another name
        shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    first.close()
    second = build(tmp_path / "copy")
    assert undisturbed == finish(second, ended)
    assert second.stats.resumes > 0
    second.close()


@pytest.mark.parametrize("change", ["key", "prompt", "bytes", "progress"])
def test_only_a_requests_own_kv_is_taken_over(
    tmp_path: Path,
    undisturbed: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """With another key, damaged bytes, or progress that can't be, a request starts anew."""
    first = build(tmp_path / "kv")
    ended = begin(first, 20)
    assert first.suspend() > 0
    first.close()
    for path in (tmp_path / "kv").glob("??/*.safetensors") if change == "bytes" else ():
        content = bytearray(path.read_bytes())
        content[-4097] ^= 1
        path.write_bytes(bytes(content))
    if change == "key":
        monkeypatch.setattr("kvtide.serve.progress._PREFIX", "other/")
    if change == "progress":
        monkeypatch.setattr("kvtide.serve.progress._text", lambda value: value + "x")
    second = build(tmp_path / "kv")
    if change == "prompt":
        monkeypatch.setattr(
            "kvtide.serve.progress.name_for", lambda request: f"request/{request.key}/00"
        )
    assert undisturbed == finish(second, ended)
    second.close()


def test_what_kept_no_digests_is_not_gone_on_with_by_an_engine_that_keeps_them(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    """`--verify` comes with `--resume` alone: such requests start anew."""
    first = build(tmp_path / "kv", keep_logits=False)
    begin(first, 20)
    assert first.suspend() > 0
    first.close()
    second = build(tmp_path / "kv")
    assert undisturbed == finish(second, [])
    second.close()


@pytest.mark.parametrize("is_sudden", [False, True])
def test_an_engine_elsewhere_goes_on_from_mooncake(
    mooncake: FakeStore, undisturbed: list[tuple[object, ...]], is_sudden: bool
) -> None:
    """It needs nothing of the first engine's machine, and that may have ended suddenly."""
    first = build(None, mooncake=SETTINGS)
    ended = begin(first, 30)
    if is_sudden:
        left = dict(mooncake.objects)
        first.close()
        mooncake.objects |= left
    else:
        assert first.suspend() > 0
        first.close()
    second = build(None, mooncake=SETTINGS)
    assert undisturbed == finish(second, ended)
    assert second.stats.resumes > 0
    second.close()
    assert {} == mooncake.objects


@pytest.mark.parametrize("change", ["salt", "exact", "chunk_tokens", "model", "layout", "nothing"])
def test_kv_of_another_namespace_is_neither_read_nor_removed(
    mooncake: FakeStore, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Requests that are equal to those of a tenant don't find them, and take nothing away."""
    owner = {"mooncake": SETTINGS, "salt": b"one tenant's secret"}
    first = build(None, **owner)
    begin(first, 20)
    saved = first.suspend()
    first.close()
    left = set(mooncake.objects)
    assert saved == len(left) > 0
    with monkeypatch.context() as patch:
        if change == "model":
            patch.setitem(vars(tiny()), "identity", "another model")
        if change == "layout":
            patch.setattr("kvtide.layout.Geometry.fingerprint", b"another layout")
        others = {"salt": b"another's", "exact": False, "chunk_tokens": 64}
        second = build(None, **owner | {name: others[name] for name in others if name == change})
        begin(second, 0)
        is_found = change in ("chunk_tokens", "nothing")  # chunks change no bit
        assert (saved if is_found else 0) == second.stats.retracted
        second.close()
    assert is_found or left == set(mooncake.objects)


HOSTILE = [
    "", "{", "[]", "{}", '{"output_ids":[]}', '{"output_ids":3}', "[" * 100_000,
    '{"output_ids":[-1],"digests":[],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1.5],"digests":[],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1],"digests":[7],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1],"digests":["x"],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1],"digests":[],"random":"AAAA","retractions":0,"exact":true}',
    '{"output_ids":[1],"digests":[],"random":3,"retractions":0,"exact":true}',
    '{"output_ids":[],"digests":[],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[300],"digests":["1"],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1],"digests":[],"random":null,"retractions":0,"exact":true}',
    '{"output_ids":[1,1,1,1,1,1,1,1,1],"digests":[],"random":null,"retractions":0,"exact":true}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_hostile_progress_is_a_miss(text: str, temperature: float) -> None:
    """It comes from a file, and changes nothing."""
    params = SamplingParams(max_new_tokens=8, temperature=temperature)
    request = Request("a", [1, 2, 3], params, key="k")
    sampler = Sampler(params)
    before = sampler.state
    with pytest.raises(SnapshotMiss):
        progress.take_over(
            f"{progress.name_for(request)}\n{text}",
            3,
            request,
            sampler,
            vocab_size=260,
            needs_digests=True,
        )
    assert ([], [], before) == (request.output_ids, request.logit_digests, sampler.state)


@pytest.mark.parametrize(("name", "key"), [("a", "k"), ("b", "k"), ("a", "l")])
def test_progress_of_another_request_is_a_miss(name: str, key: str) -> None:
    """A file of it may lie under this request's name."""
    params = SamplingParams(max_new_tokens=8)
    request, other = Request("a", [1, 2, 3], params, key="k"), Request(name, [], params, key=key)
    other.output_ids = [7]
    text, sampler = progress.to_text(other, Sampler(params)), Sampler(params)
    with nullcontext() if (name, key) == ("a", "k") else pytest.raises(SnapshotMiss):
        progress.take_over(text, 3, request, sampler, vocab_size=260, needs_digests=False)
    assert ([7] if (name, key) == ("a", "k") else []) == request.output_ids


def test_limit_of_host_memory_holds_what_stands_beside_the_blocks() -> None:
    """A sixteenth of it isn't blocks, but for seals and for what moves and tiers need."""
    options = EngineOptions(kv_memory_bytes=1 << 20, host_memory_bytes=64 << 20)
    with closing(Engine.build(tiny(), options)) as engine:
        arena = engine.tide.arena
        assert 64 << 20 == arena.limit_bytes
        assert 40 << 20 < arena.block_count * arena.block_bytes <= 60 << 20
