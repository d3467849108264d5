"""A Mooncake store below kvtide's own host memory: an engine asks it for what it doesn't know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from small_models import PLAIN, folder_of
from vllm_engine import BLOCK_TOKENS, Engine, opened_with_kvtide

from tier.fake_mooncake import FakeStore

PROMPT = Random(13).choices(range(3, 512), k=3 * BLOCK_TOKENS + 30)


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that whoever joins one gets, in this process."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    monkeypatch.setattr("kvtide.tier.retries.WAITS_S", ())
    monkeypatch.setattr("kvtide.tier.retries.REST_S", 0.0)
    return store


@contextmanager
def opened(model: str) -> Iterator[Engine]:
    """An engine without a disk, whose blocks go to the store."""
    with opened_with_kvtide(
        model,
        settings={"host_memory": "16MiB", "mooncake": "10.0.0.1:50051"},
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    ) as engine:
        yield engine


class TestBlocksInMooncake:
    def test_find_blocks_there_and_none_that_is_damaged_or_away(
        self, mooncake: FakeStore, tmp_path: Path
    ) -> None:
        model = folder_of(PLAIN, tmp_path)
        with opened(model) as engine:
            expected = engine.answer(PROMPT).tokens
            engine.go_to_disk()
            assert 3 == len(mooncake.objects)

            engine.books._below.clear()  # as in an engine on another machine
            found = engine.answer(PROMPT)
            assert (expected, 3 * BLOCK_TOKENS) == (found.tokens, found.cached_tokens)
            assert 3 == engine.counts["fetched_blocks"]
            other = engine.answer(PROMPT[::-1])
            assert 0 == other.cached_tokens

            for content in mooncake.objects.values():
                content[len(content) // 2] ^= 1
            engine.go_to_disk()
            damaged = engine.answer(PROMPT)
            assert (expected, 0) == (damaged.tokens, damaged.cached_tokens)
            assert 3 == engine.counts["damaged_blocks"]

            engine.go_to_disk()
            assert 3 * BLOCK_TOKENS == engine.answer(PROMPT).cached_tokens
            engine.go_to_disk()
            mooncake.is_master_away = True
            away = engine.answer(PROMPT)
            assert (expected, 0) == (away.tokens, away.cached_tokens)
            mooncake.is_master_away = False
            engine.check_nothing_leaked()
        assert all(client.is_closed for client in mooncake.clients)
