"""What is found of a prompt costs no more than its length; no model is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.serve.seeker import Seeker
from kvtide.tier import Spill
from serve.prefix_bench import CHUNK_TOKENS, Bench, CountedTokens, close_benches, make, numbers


@pytest.fixture(autouse=True)
def _nothing_is_held_at_the_end() -> Iterator[None]:
    yield
    close_benches()


def test_a_known_prompt_that_waits_costs_a_step_no_copy_of_its_tokens(tmp_path: Path) -> None:
    """Each step looks for its blocks. Only behind the last known one its tokens are compared."""
    bench = Bench(32, disk_dir=tmp_path, leaves_blocks=True, host_blocks=4)
    prompt = numbers(10 * CHUNK_TOKENS + 3)
    bench.answer(make("a", prompt))
    waiting = make("b", CountedTokens([*prompt, 1]))
    assert isinstance(waiting.prompt_ids, CountedTokens)
    bench.prefixes.read_ahead(waiting)  # makes the keys
    assert len(waiting.block_keys) == 11
    waiting.prompt_ids.copied_count = 0
    bench.prefixes.read_ahead(waiting)
    assert waiting.prompt_ids.copied_count <= CHUNK_TOKENS
    bench.answer(waiting)
    assert [10 * CHUNK_TOKENS + 3] == bench.computed["b"]


def test_all_that_a_disk_has_of_a_waiting_prompt_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole blocks, of which one was known, and the tail behind them."""
    monkeypatch.setattr("kvtide.serve.seeker._PATIENCE_S", 1e9)
    prompt = numbers(3 * CHUNK_TOKENS + 3)
    first = Bench(16, disk_dir=tmp_path, leaves_blocks=True, host_blocks=8)
    first.answer(make("a", prompt))
    first.leave()
    bench = Bench(16, disk_dir=tmp_path, leaves_blocks=True, host_blocks=8)
    bench.answer(make("b", prompt[: CHUNK_TOKENS + 1]))
    waiting = make("c", [*prompt, 90])
    while len(bench.prefixes.blocks.known) < 5:
        bench.prefixes.read_ahead(waiting)
    lengths = [len(block.tokens) for block in bench.prefixes.blocks.known.values()]
    assert [CHUNK_TOKENS] * 3 + [3, 1] == sorted(lengths, reverse=True)  # 1 is the end of "b"
    bench.answer(waiting)
    assert [3 * CHUNK_TOKENS + 3] == bench.computed["c"]


def test_a_wait_for_a_search_is_another_one_than_that_for_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own patience; what is known and here is not waited for."""
    bench = Bench(16, disk_dir=tmp_path, leaves_blocks=True, host_blocks=8)
    prompt = numbers(CHUNK_TOKENS + 3)
    bench.answer(make("a", prompt))
    bench.prefixes.blocks.leave()
    (block,) = (b for b in bench.prefixes.blocks.known.values() if len(b.tokens) == CHUNK_TOKENS)
    finder, awaited = bench.prefixes._finder, list[str | None]()
    monkeypatch.setattr(Seeker, "may_wait", lambda _, request, key: awaited.append(key))
    for is_coming, is_seeking in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr(Spill, "is_coming", lambda *_, so=is_coming: so)
        monkeypatch.setattr(Seeker, "is_seeking", lambda *_, so=is_seeking: so)
        finder.had_better_wait(make("b", [*prompt, 1]), block, CHUNK_TOKENS - 1, None)
    assert [block.key, None] == awaited
