"""Engines that end while moves are under way, that have room for hardly any block, or no disk."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from held_moves import BLOCKS, DISK_BYTES, OTHER, PROMPT, held, settings_of
from small_models import PLAIN, folder_of
from vllm_engine import BLOCK_BYTES, BLOCK_TOKENS, opened_with_kvtide

from kvtide.tier import DiskTier


class TestEndOfAnEngine:
    def test_with_moves_under_way_leaves_nothing_in_use(self, tmp_path: Path) -> None:
        with opened_with_kvtide(
            settings=settings_of(tmp_path, 8 * BLOCK_BYTES), skip_tokenizer_init=True
        ) as engine:
            engine.answer(PROMPT)
            engine.forget_local()
            store = engine.store
            with held(engine) as go:
                for prompt in (OTHER, PROMPT):
                    engine.begin(prompt)
                    engine.step()
                    engine.step()
                assert {True, False} == {move.is_load for move in store._moves.values()}
                threading.Timer(0.1, go.set).start()
                engine.llm.llm_engine.engine_core.shutdown()

        assert store._arena.used_bytes == 0
        with closing(DiskTier(tmp_path / "vllm" / "0-of-1-0", limit_bytes=DISK_BYTES)) as tier:
            assert tier.stats.snapshots >= BLOCKS


class TestHostMemoryThatIsTooSmall:
    @pytest.mark.parametrize("room", [1, 4])
    def test_takes_what_fits_and_costs_no_answer(self, room: int, tmp_path: Path) -> None:
        with opened_with_kvtide(
            settings=settings_of(tmp_path, room * BLOCK_BYTES), skip_tokenizer_init=True
        ) as engine:
            expected = [answer.tokens for answer in engine.answers([PROMPT, OTHER])]
            for _ in range(3):
                engine.forget_local()
                found = engine.answers([PROMPT, OTHER])
                assert expected == [answer.tokens for answer in found]
                engine.check_nothing_leaked()

            assert engine.store._arena.peak_bytes <= room * BLOCK_BYTES
            assert engine.counts["unsaved_blocks"] > 0
            assert engine.counts["loaded_blocks"] > 0
            assert engine.counts["damaged_blocks"] == engine.counts["failed_loads"] == 0


class TestDamageWithoutADisk:
    def test_costs_one_request_its_time(self, tmp_path: Path) -> None:
        prompt = Random(1).choices(range(3, 512), k=4 * BLOCK_TOKENS + 30)
        with opened_with_kvtide(
            folder_of(PLAIN, tmp_path),
            settings={"host_memory": "64MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
        ) as engine:
            engine.answer(prompt)
            first = next(iter(engine.store._held.values()))
            first.lease.blocks[0].bytes_view(1)[0] ^= 1
            engine.forget_local()
            engine.answer(prompt)
            engine.forget_local()

            assert engine.answer(prompt).cached_tokens == 4 * BLOCK_TOKENS
            assert engine.counts["failed_loads"] == 1
            engine.check_nothing_leaked()
