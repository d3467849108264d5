"""With a disk below host memory, KV that has no room in host memory isn't computed again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtide.errors import UsageError
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.request import Request, SamplingParams
from serve.harness import answers, check_rows_once, poison_released, run_all, tiny, token_bytes

BLOCK_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all engines of one model share a self-check."""
    check_rows_once(monkeypatch)


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


def build(folder: Path | None, **more: object) -> Engine:
    """Builds an engine whose pool has room for three requests, and the arena for two."""
    options = EngineOptions(
        kv_memory_bytes=280 * token_bytes(tiny()),
        host_memory_bytes=2 * BLOCK_BYTES,
        disk_dir=folder,
        keep_logits=True,
        **more,  # type: ignore[arg-type]
    )
    return Engine.build(tiny(), options)


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
    assert stats.disk_written_bytes > 0
    assert stats.disk_read_bytes > 0
    assert 0 < stats.peak_disk_bytes <= stats.disk_limit_bytes
    assert not list((tmp_path / "kv").glob("??/*.safetensors"))


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
        for path in (tmp_path / "kv").glob("??/*.safetensors") if removed < 3 else ():
            path.unlink()
            removed += 1
        engine.step()
    engine.close()
    assert answers(expected) == answers(requests)
    assert 3 <= removed
    assert engine.scheduler.stats.missing > 0
    assert 0 == engine.tide.arena.used_bytes


def test_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(UsageError, match="cannot use the folder"):
        build(tmp_path / "no" / "parent")
