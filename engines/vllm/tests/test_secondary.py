"""kvtide's tier below vLLM's own host memory: found after a restart, and damage is a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from plain_copy import plain_config
from small_models import WINDOWS, folder_of
from vllm_engine import Engine, opened

from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.secondary import KvtideTier
from kvtide.plugin.vllm.settings import TIER, TIER_CONNECTOR

PROMPT = Random(5).choices(range(3, 512), k=1300)
HOST_BYTES = 64 << 20


@contextmanager
def opened_with_tier(model: str, disk_dir: Path) -> Iterator[Engine]:
    """An engine with vLLM's own host memory, and its secondary tier, which is kvtide's."""
    from vllm.config import KVTransferConfig

    entry = {"type": TIER, "disk_dir": str(disk_dir), "disk_memory": "64MiB"}
    transfer = KVTransferConfig(**plain_config(HOST_BYTES, entry, connector=TIER_CONNECTOR))
    with opened(
        model,
        kv_transfer_config=transfer,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=200,
    ) as engine:
        scheduler = engine.core.scheduler.connector.connector_scheduler
        tier = scheduler.manager.secondary_tiers[0]
        take_counts = tier._moves.take_counts

        def counted() -> Counter[str]:
            counts: Counter[str] = take_counts()
            engine.counts += counts
            return counts

        tier._moves.take_counts = counted
        yield engine


class TestSecondaryTier:
    def test_gives_chunks_to_the_next_engine_and_none_that_is_damaged(self, tmp_path: Path) -> None:
        model, disk_dir = folder_of(WINDOWS, tmp_path), tmp_path / "kv"
        with opened_with_tier(model, disk_dir) as engine:
            expected = engine.answer(PROMPT).tokens
        files = list(disk_dir.rglob("*.safetensors"))
        assert files

        with opened_with_tier(model, disk_dir) as engine:
            found = engine.answer(PROMPT)
            assert found.cached_tokens >= 1024
            assert expected == found.tokens
            assert engine.counts["fetched_blocks"] > 0
            assert engine.counts["damaged_blocks"] == 0

            for path in files:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            manager = engine.core.scheduler.connector.connector_scheduler.manager
            engine.forget_local()
            manager.primary_tier.reset_cache()
            damaged = engine.answer(PROMPT)
            assert (expected, 0) == (damaged.tokens, damaged.cached_tokens)
            assert engine.counts["damaged_blocks"] > 0

    def test_needs_the_connector_that_tells_it_the_weights(self, tmp_path: Path) -> None:
        rows = memoryview(bytearray(64)).cast("b", (8, 8))
        spec: Any = SimpleNamespace(config=None)
        with pytest.raises(Refused, match=TIER_CONNECTOR):
            KvtideTier(spec, rows, TIER, disk_dir=str(tmp_path))
