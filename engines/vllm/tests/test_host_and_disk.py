"""SmolLM2 with kvtide: hits from host memory and from a disk, and damage in both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from vllm_engine import BLOCK_TOKENS, Answer, Engine, opened, opened_with_kvtide
from watched_moves import WatchedMoves

HERE = Path(__file__).parent
PROMPT = Random(7).choices(range(1000, 40_000), k=5 * BLOCK_TOKENS + 30)
FULL = 5 * BLOCK_TOKENS
"""How many tokens of the prompt fill whole blocks."""
HOST = {"host_memory": "64MiB"}


@pytest.fixture(scope="module")
def without() -> Answer:
    """The answer of vLLM alone, with the prompt's whole blocks from its own cache.

    A hit computes as many tokens at once, so this run has the same shape.
    """
    with opened() as engine:
        engine.answer(PROMPT)
        return engine.answer(PROMPT)


@pytest.fixture(scope="class")
def watched(without: Answer) -> Iterator[tuple[Engine, WatchedMoves]]:
    """An engine with host memory alone that has computed the prompt, when no other is open."""
    with opened_with_kvtide(settings=HOST) as engine:
        moves = WatchedMoves(engine.store)
        engine.answer(PROMPT)
        yield engine, moves


def flip_a_bit(path: Path) -> None:
    """Changes a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class TestHostMemory:
    def test_gives_a_prompt_its_blocks_back_byte_for_byte(
        self, watched: tuple[Engine, WatchedMoves], without: Answer
    ) -> None:
        engine, moves = watched
        engine.forget_local()
        before = moves.compared

        assert without == engine.answer(PROMPT)
        assert without.cached_tokens == FULL
        assert moves.compared - before == FULL // BLOCK_TOKENS

    def test_without_its_loads_would_give_a_wrong_answer(
        self, watched: tuple[Engine, WatchedMoves], without: Answer
    ) -> None:
        engine, moves = watched
        engine.forget_local()
        moves.skips_loads = True
        try:
            assert without.tokens != engine.answer(PROMPT).tokens
        finally:
            moves.skips_loads = False

    def test_with_a_wrong_bit_costs_a_request_its_time_once(
        self, watched: tuple[Engine, WatchedMoves], without: Answer
    ) -> None:
        engine, _ = watched
        engine.forget_local()
        before = engine.counts.copy()
        third = list(engine.store._held.values())[2]
        third.lease.blocks[0].bytes_view(1)[0] ^= 1

        assert without.tokens == engine.answer(PROMPT).tokens
        found = engine.counts - before
        assert (found["damaged_blocks"], found["failed_loads"]) == (1, 1)

        engine.forget_local()
        assert without == engine.answer(PROMPT)
        again = engine.counts - before
        assert (again["damaged_blocks"], again["failed_loads"]) == (1, 1)


class TestDisk:
    def test_gives_blocks_to_the_next_process_and_none_that_is_damaged(
        self, tmp_path: Path, without: Answer
    ) -> None:
        settings = {**HOST, "disk_dir": str(tmp_path), "disk_memory": "256MiB"}
        said = run_in_another_process(settings)
        assert said["tokens"] == without.tokens

        with opened_with_kvtide(settings=settings) as engine:
            assert without == engine.answer(PROMPT)
            assert engine.counts["fetched_blocks"] == FULL // BLOCK_TOKENS

        files = sorted(tmp_path.rglob("*.safetensors"))
        assert len(files) == FULL // BLOCK_TOKENS
        for path in files:
            flip_a_bit(path)
        with opened_with_kvtide(settings=settings) as engine:
            found = engine.answer(PROMPT)
            assert (without.tokens, 0) == (found.tokens, found.cached_tokens)
            assert engine.counts["failed_loads"] == 0
            damaged = engine.counts["damaged_blocks"]
            assert damaged >= 1

            engine.forget_local()
            assert without == engine.answer(PROMPT)
            assert engine.counts["damaged_blocks"] == damaged


class TestFailedLoad:
    def test_ends_one_request_where_the_operator_wants_that_and_not_the_engine(
        self, without: Answer
    ) -> None:
        with opened_with_kvtide(settings=HOST, policy="fail") as engine:
            engine.answer(PROMPT)
            engine.forget_local()
            for snapshot in engine.store._held.values():
                snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1

            assert engine.answer(PROMPT).reason == "error"
            assert without.tokens == engine.answer(PROMPT).tokens


def run_in_another_process(settings: dict[str, str]) -> dict[str, list[int]]:
    """Answers the prompt in a process of its own, which ends; what it said."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import conftest\n"
        "from vllm_engine import opened_with_kvtide\n"
        "settings, prompt = map(json.loads, sys.argv[2:4])\n"
        "with opened_with_kvtide(settings=settings) as engine:\n"
        "    tokens = engine.answer(prompt).tokens\n"
        "print('said', json.dumps({'tokens': tokens}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE), json.dumps(settings), json.dumps(PROMPT)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("said "))
    said: dict[str, list[int]] = json.loads(line.removeprefix("said "))
    return said
