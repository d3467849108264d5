"""Moves that haven't ended yet: aborts, other requests, resets. And two engines on one folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from held_moves import BLOCKS, DISK_BYTES, OTHER, PROMPT, held, settings_of
from vllm_engine import BLOCK_BYTES, BLOCK_TOKENS, Engine, opened_with_kvtide

from kvtide.tier import DiskTier

PROMPTS = {"prompt": PROMPT, "other": OTHER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two engines."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def first(folder: Path) -> Iterator[DiskTier]:
    """The disk tier of the first engine, which still runs."""
    (folder / "vllm").mkdir()
    with closing(DiskTier(folder / "vllm" / "0-of-1-0", limit_bytes=DISK_BYTES)) as tier:
        yield tier


@pytest.fixture(scope="module")
def opened_engine(folder: Path, first: DiskTier) -> Iterator[Engine]:
    """The second engine."""
    with opened_with_kvtide(
        settings=settings_of(folder, 8 * BLOCK_BYTES), skip_tokenizer_init=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(opened_engine: Engine) -> dict[str, list[int]]:
    """The answers to both prompts, computed."""
    return {name: opened_engine.answer(prompt).tokens for name, prompt in PROMPTS.items()}


@pytest.fixture
def engine(opened_engine: Engine, expected: dict[str, list[int]]) -> Engine:
    """The engine, with both prompts' blocks in host memory alone."""
    for prompt in PROMPTS.values():
        opened_engine.answer(prompt)
    opened_engine.forget_local()
    opened_engine.counts.clear()
    return opened_engine


class TestSecondEngineOnAFolder:
    def test_has_a_folder_of_its_own(self, engine: Engine, first: DiskTier, folder: Path) -> None:
        engine.go_to_disk()

        assert ["0-of-1-0", "0-of-1-1"] == sorted(path.name for path in (folder / "vllm").iterdir())
        assert engine.answer(PROMPT).cached_tokens == BLOCKS * BLOCK_TOKENS
        assert first.stats.snapshots == 0


class TestLoadUnderWay:
    def test_of_a_request_that_is_aborted_writes_to_nobody_elses_blocks(
        self, engine: Engine, expected: dict[str, list[int]]
    ) -> None:
        with held(engine) as go:
            aborted = engine.begin(PROMPT)
            for _ in range(3):
                engine.step()
            (move,) = engine.store._moves.values()
            assert move.is_load
            engine.abort(aborted)
            engine.begin(OTHER[:-BLOCK_TOKENS])
            for _ in range(3):
                engine.step()
            go.set()

        engine.check_nothing_leaked()
        for name, prompt in PROMPTS.items():
            engine.forget_local()
            assert expected[name] == engine.answer(prompt).tokens

    def test_lets_another_request_wait_for_the_same_blocks(
        self, engine: Engine, expected: dict[str, list[int]]
    ) -> None:
        """Only first tokens are compared: later ones depend on who else is computed."""
        with held(engine) as go:
            engine.begin(PROMPT, 1)
            engine.step()
            timer = threading.Timer(0.05, go.set)
            timer.start()
            both = engine.answers([PROMPT], 1)
            timer.join()

        assert [expected["prompt"][:1]] * 2 == [found.tokens for found in both]
        assert engine.counts["loaded_blocks"] == BLOCKS
        engine.check_nothing_leaked()


class TestReset:
    def test_while_a_save_is_under_way_forgets_what_it_saves(
        self, engine: Engine, expected: dict[str, list[int]]
    ) -> None:
        engine.llm.reset_prefix_cache(reset_connector=True)
        with held(engine) as go:
            engine.begin(PROMPT, 1)
            for _ in range(3):
                engine.step()
            threading.Timer(0.05, go.set).start()
            assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.check_nothing_leaked()
        assert not engine.store._held

        assert (expected["prompt"], 0) == _told(engine, PROMPT)
        engine.check_nothing_leaked()


def _told(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    found = engine.answer(prompt)
    return found.tokens, found.cached_tokens
