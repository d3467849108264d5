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
        disk = tmp_path / "kv"
        with opened_with_kvtide(
            folder_of(config, tmp_path),
            settings={"host_memory": "256MiB", "disk_dir": str(disk), "disk_memory": "256MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            num_gpu_blocks_override=200,
        ) as engine:
            moves = WatchedMoves(engine.store)
            engine.answer(PROMPT)
            assert group_count == len(engine.store._groups)

            for empty in (engine.forget_local, engine.go_to_disk):
                empty()
                before, loaded = moves.compared, engine.counts["loaded_blocks"]
                assert engine.answer(PROMPT).cached_tokens >= least_cached
                assert moves.compared - before == engine.counts["loaded_blocks"] - loaded > 0
            assert engine.counts["fetched_blocks"] > 0
            assert engine.counts["failed_loads"] == engine.counts["unsaved_blocks"] == 0

            for snapshot in engine.store._held.values():
                snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
            engine.forget_local()
            before, loaded = moves.compared, engine.counts["loaded_blocks"]
            assert engine.answer(PROMPT).cached_tokens >= least_cached  # since the disk has them
            assert moves.compared - before == engine.counts["loaded_blocks"] - loaded > 0
            assert engine.counts["failed_loads"] == 1

            engine.go_to_disk()
            before, damaged = moves.compared, engine.counts["damaged_blocks"]
            for path in disk.rglob("*.safetensors"):
                flip_a_bit(path)
            found = engine.answer(PROMPT)
            assert (found.reason, found.cached_tokens, moves.compared) == ("length", 0, before)
            assert engine.counts["damaged_blocks"] > damaged

            damaged = engine.counts["damaged_blocks"]
            engine.forget_local()
            assert engine.answer(PROMPT).cached_tokens >= least_cached
            assert (engine.counts["damaged_blocks"], engine.counts["failed_loads"]) == (damaged, 1)
            engine.check_nothing_leaked()


def flip_a_bit(path: Path) -> None:
    """Changes a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
