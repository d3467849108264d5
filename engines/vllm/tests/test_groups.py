"""Models whose layers keep KV in several groups, or latent: every byte of each comes back."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from small_models import LATENT, RECURRENT, WINDOWS, folder_of
from vllm_engine import opened_with_kvtide
from watched_moves import WatchedMoves

PROMPT = Random(3).choices(range(3, 512), k=1300)


@pytest.mark.parametrize(
    ("config", "group_count", "least_cached"),
    [
        pytest.param(WINDOWS, 3, 1024, id="windows"),
        pytest.param(RECURRENT, 4, 1024, id="recurrent"),
        pytest.param(LATENT, 1, 1024, id="latent"),
    ],
)
class TestGroups:
    def test_come_back_byte_for_byte_and_not_at_all_if_damaged(
        self, config: dict[str, Any], group_count: int, least_cached: int, tmp_path: Path
    ) -> None:
        with opened_with_kvtide(
            folder_of(config, tmp_path),
            settings={"host_memory": "256MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            num_gpu_blocks_override=200,
        ) as engine:
            moves = WatchedMoves(engine.store)
            engine.answer(PROMPT)
            engine.forget_local()
            found = engine.answer(PROMPT)

            assert group_count == len(engine.store._groups)
            assert found.cached_tokens >= least_cached
            loaded = engine.counts["loaded_blocks"]
            assert moves.compared == loaded > 0
            assert engine.counts["failed_loads"] == engine.counts["unsaved_blocks"] == 0

            for snapshot in engine.store._held.values():
                snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
            engine.forget_local()
            assert engine.answer(PROMPT).tokens
            assert (engine.counts["failed_loads"], moves.compared) == (1, loaded)
