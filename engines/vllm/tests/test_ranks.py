"""Two ranks (tensor parallel): each has its half of every block, and both must have it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from small_models import PLAIN, folder_of
from vllm_engine import BLOCK_TOKENS, Engine, opened_with_kvtide, store_of_rank
from watched_moves import WatchedMoves

BLOCKS = 2
PROMPT = Random(3).choices(range(3, 512), k=BLOCKS * BLOCK_TOKENS + 20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine of two ranks, each a process of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    settings = {"host_memory": "8MiB", "disk_dir": str(folder / "kv"), "disk_memory": "16MiB"}
    # vLLM would bind each rank to a processor of its own, and this machine may have one.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        with opened_with_kvtide(
            folder_of(PLAIN, folder),
            settings=settings,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        ) as engine:
            engine.folder = folder / "kv"
            engine.llm.collective_rpc(watch)
            engine.answer(PROMPT, 1)
            yield engine


class TestTwoRanks:
    def test_get_their_halves_back_byte_for_byte(self, engine: Engine) -> None:
        engine.forget_local()
        before = engine.llm.collective_rpc(compared)

        assert engine.answer(PROMPT, 1).cached_tokens == BLOCKS * BLOCK_TOKENS
        after = engine.llm.collective_rpc(compared)
        assert [BLOCKS] * 2 == [now - then for now, then in zip(after, before, strict=True)]

    def test_compute_again_what_is_damaged_on_one(self, engine: Engine) -> None:
        engine.forget_local()
        engine.counts.clear()
        engine.llm.collective_rpc(damage_second)

        assert engine.answer(PROMPT, 1).reason == "length"
        assert (engine.counts["damaged_blocks"], engine.counts["failed_loads"]) == (BLOCKS, 1)
        engine.forget_local()
        assert engine.answer(PROMPT, 1).cached_tokens == BLOCKS * BLOCK_TOKENS
        assert engine.counts["failed_loads"] == 1

    def test_get_what_both_have_on_their_disks(self, engine: Engine) -> None:
        engine.go_to_disk()
        engine.counts.clear()

        assert engine.answer(PROMPT, 1).cached_tokens == BLOCKS * BLOCK_TOKENS
        assert engine.counts["fetched_blocks"] == 2 * BLOCKS

        engine.go_to_disk()
        for path in (engine.folder / "vllm" / "1-of-2-0").rglob("*.safetensors"):
            path.unlink()
        assert engine.answer(PROMPT, 1).cached_tokens == 0
        assert engine.counts["missing_blocks"] == BLOCKS
        engine.check_nothing_leaked()


def watch(worker: Any) -> None:
    """In each rank: watches its moves."""
    store = store_of_rank()
    store.watch = WatchedMoves(store)


def compared(worker: Any) -> int:
    """In each rank: how many blocks came back with the bytes that were saved."""
    count: int = store_of_rank().watch.compared
    return count


def damage_second(worker: Any) -> None:
    """In the second rank: flips a bit of each block in host memory."""
    if worker.rank == 1:
        for snapshot in store_of_rank()._held.values():
            snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
