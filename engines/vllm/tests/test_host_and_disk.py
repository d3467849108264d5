"""SmolLM2 with kvtide: hits from host memory and from a disk, and what may go wrong with both."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm_engine import BLOCK_TOKENS, Answer, Engine, opened, opened_with_kvtide
from watched_moves import WatchedMoves

BLOCKS = 5
"""How many whole blocks the prompt fills."""
FULL = BLOCKS * BLOCK_TOKENS
PROMPT = Random(7).choices(range(1000, 40_000), k=FULL + 30)


@pytest.fixture(scope="module")
def without() -> Answer:
    """The answer of vLLM alone, with the prompt's whole blocks from its own cache.

    A hit computes as many tokens at once, so this run has the same shape.
    """
    with opened() as engine:
        tokenizer = engine.llm.get_tokenizer()
        sentence = engine.answer(tokenizer.encode("The capital of France is"), 4).tokens
        assert tokenizer.decode(sentence).startswith(" Paris")
        engine.answer(PROMPT)
        return engine.answer(PROMPT)


@pytest.fixture(scope="module")
def shared(
    without: Answer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, WatchedMoves]]:
    """An engine that has saved the prompt's blocks, opened when no other is open."""
    folder = tmp_path_factory.mktemp("disk")
    settings = {"host_memory": "128MiB", "disk_dir": str(folder), "disk_memory": "512MiB"}
    with opened_with_kvtide(settings=settings, skip_tokenizer_init=True) as engine:
        engine.folder = folder
        moves = WatchedMoves(engine.store)
        assert without.tokens == engine.answer(PROMPT).tokens
        yield engine, moves


@pytest.fixture
def engine(shared: tuple[Engine, WatchedMoves]) -> Engine:
    """The engine, with the prompt's blocks in host memory and on the disk."""
    shared[0].answer(PROMPT)
    shared[0].forget_local()
    shared[0].counts.clear()
    return shared[0]


@pytest.fixture
def moves(shared: tuple[Engine, WatchedMoves]) -> WatchedMoves:
    """What watches the engine's moves."""
    return shared[1]


class TestHostMemory:
    def test_gives_a_prompt_its_blocks_back_byte_for_byte(
        self, engine: Engine, moves: WatchedMoves, without: Answer
    ) -> None:
        before = moves.compared

        assert without == engine.answer(PROMPT)
        assert without.cached_tokens == FULL
        assert moves.compared - before == BLOCKS

    def test_without_its_loads_would_give_a_wrong_answer(
        self, engine: Engine, moves: WatchedMoves, without: Answer
    ) -> None:
        moves.skips_loads = True
        try:
            assert without.tokens != engine.answer(PROMPT).tokens
        finally:
            moves.skips_loads = False

    def test_with_a_wrong_bit_costs_a_request_its_time_once(
        self, engine: Engine, without: Answer
    ) -> None:
        third = list(engine.store._held.values())[2]
        third.lease.blocks[0].bytes_view(1)[0] ^= 1

        assert without.tokens == engine.answer(PROMPT).tokens
        engine.forget_local()
        assert without == engine.answer(PROMPT)
        assert (engine.counts["damaged_blocks"], engine.counts["failed_loads"]) == (1, 1)

    def test_with_a_wrong_bit_ends_one_request_where_the_operator_wants_that(
        self, engine: Engine, without: Answer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # What vLLM's scheduler makes of "kv_load_failure_policy": "fail".
        monkeypatch.setattr(engine.core.scheduler, "recompute_kv_load_failures", False)
        next(iter(engine.store._held.values())).lease.blocks[0].bytes_view(1)[0] ^= 1

        assert engine.answer(PROMPT).reason == "error"
        assert without.tokens == engine.answer(PROMPT).tokens
        engine.check_nothing_leaked()


class TestDisk:
    def test_gives_a_prompt_its_blocks_back_byte_for_byte(
        self, engine: Engine, moves: WatchedMoves, without: Answer
    ) -> None:
        engine.go_to_disk()
        before = moves.compared

        assert without == engine.answer(PROMPT)
        assert engine.counts["fetched_blocks"] == moves.compared - before == BLOCKS

    def test_costs_a_waiting_request_few_steps_and_one_question_a_block(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One step begins the fetches and waits for them, one loads, and one answers."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        engine.go_to_disk()
        monkeypatch.setattr(get_kv_transfer_group(), "_idle_wait_s", 60)
        asked, steps = Counter[bytes](), Counter[bool]()
        look_up, schedule = engine.books.look_up, engine.core.scheduler.schedule

        def counted(key: bytes, asker: Any) -> Any:
            asked[key] += 1
            return look_up(key, asker)

        def noted(*args: Any) -> Any:
            scheduled = schedule(*args)
            steps[scheduled.total_num_scheduled_tokens > 0] += 1
            return scheduled

        monkeypatch.setattr(engine.books, "look_up", counted)
        monkeypatch.setattr(engine.core.scheduler, "schedule", noted)
        engine.answer(PROMPT, 1)

        assert (2, 1) == (steps[False], steps[True])
        assert {2} == {*asked.values()}  # once to begin, once when all have come

    def test_that_is_slow_isnt_asked_about_again_and_again(
        self, engine: Engine, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.go_to_disk()
        asked = Counter[bytes]()
        look_up = engine.books.look_up

        def counted(key: bytes, asker: Any) -> Any:
            asked[key] += 1
            return look_up(key, asker)

        monkeypatch.setattr(engine.books, "look_up", counted)
        engine.begin(PROMPT)
        for _ in range(10):
            engine.step()

        assert {1} == {*asked.values()}
        hung.set()
        engine.end_all()


def flip(files: list[Path]) -> int:
    """Changes a bit in the middle of a file."""
    content = bytearray(files[2].read_bytes())
    content[len(content) // 2] ^= 1
    files[2].write_bytes(content)
    return 1


def cut(files: list[Path]) -> int:
    """Leaves half of a file."""
    os.truncate(files[2], files[2].stat().st_size // 2)
    return 1


def swap(files: list[Path]) -> int:
    """Gives two files each other's names."""
    spare = files[1].with_name("spare")
    files[1].rename(spare)
    files[3].rename(files[1])
    spare.rename(files[3])
    return 2


def lose(files: list[Path]) -> int:
    """Removes a file."""
    files[2].unlink()
    return 0


class TestDamagedFiles:
    @pytest.mark.parametrize("harm", [flip, cut, swap, lose])
    def test_are_misses_once(
        self, harm: Callable[[list[Path]], int], engine: Engine, without: Answer
    ) -> None:
        engine.go_to_disk()
        files = sorted(engine.folder.rglob("*.safetensors"))
        assert len(files) == BLOCKS
        damaged = harm(files)

        found = engine.answer(PROMPT)
        assert without.tokens == found.tokens
        assert found.cached_tokens < FULL
        assert (damaged, 0) == (engine.counts["damaged_blocks"], engine.counts["failed_loads"])

        engine.go_to_disk()
        assert without == engine.answer(PROMPT)
        assert damaged == engine.counts["damaged_blocks"]
        engine.check_nothing_leaked()


def failing(number: int) -> Callable[..., int]:
    """A system call that fails."""

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def hung(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Makes reads of the disk hang until it is set."""
    go, preadv = threading.Event(), os.preadv

    def hang(*args: Any) -> int:
        go.wait()
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", hang)
    yield go
    go.set()
    engine.end_all()
    engine.store._reader._threads._workers.start(lambda: None).wait()


class TestSickDisk:
    def test_that_gives_errors_is_a_miss(
        self, engine: Engine, without: Answer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.go_to_disk()
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", failing(errno.EIO))
            assert (without.tokens, 0) == _told(engine.answer(PROMPT))

        engine.go_to_disk()
        assert without == engine.answer(PROMPT)
        engine.check_nothing_leaked()

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
    def test_that_takes_nothing_costs_no_request(
        self, number: int, engine: Engine, without: Answer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine.llm.reset_prefix_cache(reset_connector=True)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", failing(number))
            assert (without.tokens, 0) == _told(engine.answer(PROMPT))
            engine.forget_local()
            assert without == engine.answer(PROMPT)
            engine.go_to_disk()

        assert (without.tokens, 0) == _told(engine.answer(PROMPT))
        assert engine.counts["failed_writes"] == BLOCKS
        engine.check_nothing_leaked()

    def test_that_hangs_costs_a_request_the_deadline_and_the_next_nothing(
        self, engine: Engine, without: Answer, hung: threading.Event, monkeypatch: Any
    ) -> None:
        engine.go_to_disk()
        monkeypatch.setattr(engine.store._reader._threads, "deadline_s", 0.1)
        assert (without.tokens, 0) == _told(engine.answer(PROMPT))

        engine.go_to_disk()
        monkeypatch.setattr(engine.store._reader._threads, "deadline_s", 600.0)
        assert (without.tokens, 0) == _told(engine.answer(PROMPT))

        hung.set()
        engine.forget_local()
        assert without == engine.answer(PROMPT)
        engine.check_nothing_leaked()


class TestAbort:
    def test_of_a_request_that_waits_for_a_fetch_leaves_nothing(
        self, engine: Engine, hung: threading.Event, without: Answer
    ) -> None:
        engine.go_to_disk()
        name = engine.begin(PROMPT)
        for _ in range(3):
            engine.step()
        engine.abort(name)
        hung.set()

        engine.check_nothing_leaked()
        assert without == engine.answer(PROMPT)


class TestLostDisk:
    """The last of this module, since the engine has no disk from here on."""

    def test_is_a_miss(self, engine: Engine, without: Answer) -> None:
        engine.go_to_disk()
        (folder,) = (engine.folder / "vllm").iterdir()
        shutil.rmtree(folder)

        assert (without.tokens, 0) == _told(engine.answer(PROMPT))
        engine.forget_local()
        assert without == engine.answer(PROMPT)
        engine.check_nothing_leaked()


def _told(answer: Answer) -> tuple[list[int], int]:
    return answer.tokens, answer.cached_tokens
