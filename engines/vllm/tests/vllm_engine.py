"""Engines of vLLM in this process: opened, asked and closed."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvtide.plugin.vllm.settings import transfer_config

SMOLLM2 = os.environ.get("KVTIDE_SMOLLM2", "")
"""The folder of the model's weights; `make test-vllm` sets it."""
BLOCK_TOKENS = 128
"""How many tokens of SmolLM2 vLLM keeps in a block on a CPU."""
DTYPE = "float32"
"""Every CPU computes fast in it; bfloat16 needs instructions that not all of them have."""
BLOCK_BYTES = 46_080 * BLOCK_TOKENS
"""The KV of a block of SmolLM2 in that dtype, in all layers."""


@final
@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, how many tokens of the prompt weren't computed, and why it ended."""

    tokens: list[int]
    cached_tokens: int
    reason: str


@final
class Engine:
    """A `vllm.LLM` with or without kvtide."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.counts: Counter[str] = Counter()
        """What kvtide has counted so far, by the names of its metrics' middle parts."""
        self.folder = Path()
        """Where its blocks lie on a disk, if they do."""
        self._begun = 0

    def answer(self, prompt: Sequence[int], token_count: int = 8) -> Answer:
        """The answer to one prompt, a list of tokens."""
        return self.answers([prompt], token_count)[0]

    def answers(self, prompts: Sequence[Sequence[int]], token_count: int = 8) -> list[Answer]:
        """The tokens that the model finds likeliest, for prompts that run together."""
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = self.llm.generate(given, _wanted(token_count), use_tqdm=False)
        return [
            Answer(
                list(each.outputs[0].token_ids),
                each.num_cached_tokens or 0,
                str(each.outputs[0].finish_reason),
            )
            for each in found
        ]

    def forget_local(self) -> None:
        """Makes vLLM forget what it has on the device, so that kvtide is asked."""
        assert self.llm.reset_prefix_cache()

    def go_to_disk(self) -> None:
        """Empties host memory as other blocks would, once all writes have ended; and the device."""
        self.forget_local()
        self.llm.collective_rpc(_wait_for_writes)
        for key in tuple(self.books._idle(())):
            self.books._drop(key)

    def begin(self, prompt: Sequence[int], token_count: int = 8) -> str:
        """Gives the engine a request, which `step` goes on with; its name."""
        self._begun += 1
        # vLLM sorts answers by these, as numbers; its own count from 0.
        name, given = str(-self._begun), {"prompt_token_ids": list(prompt)}
        return str(self.llm.llm_engine.add_request(name, given, _wanted(token_count)))

    def step(self) -> None:
        """Goes on with all requests, by a step of the scheduler."""
        self.llm.llm_engine.step()

    def end_all(self) -> None:
        """Goes on until no request is left, and no move of kvtide's."""
        while self.core.scheduler.has_requests():
            self.step()

    def abort(self, name: str) -> None:
        """Ends a request whose client is gone."""
        self.llm.llm_engine.abort_request([name])

    def check_nothing_leaked(self) -> None:
        """At the end host memory has the blocks of the books alone, and the device has none."""
        self.end_all()
        entries = self.books._entries
        assert all(entry.place.name == "HERE" and not entry.readers for entry in entries.values())
        for held in self.llm.collective_rpc(_what_is_held):
            assert {*entries} == held
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # block 0 is nobody's

    @property
    def core(self) -> Any:
        """vLLM's EngineCore, in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def store(self) -> Any:
        """The BlockStore of the only rank."""
        return store_of_rank()

    @property
    def manager(self) -> Any:
        """The scheduler's KvtideManager."""
        return self.core.scheduler.connector.connector_scheduler.manager

    @property
    def books(self) -> Any:
        """The scheduler's BlockBooks."""
        return self.manager.books


def store_of_rank() -> Any:
    """In a rank's process: its BlockStore."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker.store


def _wait_for_writes(_: Any) -> None:
    """In each rank: blocks until no write to a tier is under way."""
    while store_of_rank()._writer._running:
        time.sleep(0.001)


def _what_is_held(_: Any) -> set[bytes]:
    """In each rank: the blocks in host memory, which nothing else is in."""
    store = store_of_rank()
    assert store._arena.used_bytes == len(store._held) * store._arena.block_bytes
    assert store._arena.used_bytes <= store._arena.limit_bytes
    assert not store._moves
    assert store._reader is None or not store._reader._fetches
    return {*store._held}


def _wanted(token_count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=token_count, ignore_eos=True)


@contextmanager
def opened(model: str = SMOLLM2, **options: Any) -> Iterator[Engine]:
    """An engine that exists within the block; the next one may have other options."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    assert model, "set KVTIDE_SMOLLM2 to the folder of the model, as `make test-vllm` does"
    wanted: dict[str, Any] = {"enforce_eager": True, "max_model_len": 2048}
    wanted["num_gpu_blocks_override"] = 40
    if model == SMOLLM2:
        wanted["dtype"] = DTYPE
    engine: Engine | None = None
    gc.freeze()  # vLLM collects five times as it starts, half a second each over all that is there
    try:
        engine = Engine(LLM(model, **{**wanted, **options}))
        yield engine
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
            engine.llm = None
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


@contextmanager
def opened_with_kvtide(
    model: str = SMOLLM2, *, policy: str = "recompute", settings: dict[str, str], **options: Any
) -> Iterator[Engine]:
    """An engine with kvtide's connector. Its counts are added up in `Engine.counts`."""
    from vllm.config import KVTransferConfig

    transfer = {**transfer_config(settings), "kv_load_failure_policy": policy}
    with opened(model, kv_transfer_config=KVTransferConfig(**transfer), **options) as engine:
        engine.manager.get_stats = lambda: None  # otherwise vLLM takes the counts away
        engine.counts = engine.manager.counts
        yield engine
