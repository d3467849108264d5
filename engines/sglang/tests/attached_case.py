"""Fixtures: a decode server's scheduler, whose pool kvtide covers, with kvtide attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from requests_of import ALONE, SETTINGS, Config, Place, Scheduler, config
from sglang.srt import runtime_context

from kvtide.plugin.sglang import attachment as attaching
from kvtide.plugin.sglang.attachment import Attachment, attach


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A function that configures the server; the default is a decode server alone on its host."""
    ranks = ExitStack()

    def set_config(parallel: Mapping[str, Any] = ALONE, **disagg: Any) -> None:
        bag = SimpleNamespace(**config(**disagg))
        monkeypatch.setattr(runtime_context, "get_disagg", lambda: bag)
        ranks.enter_context(runtime_context.get_parallel().override(**parallel))

    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    monkeypatch.setattr(attaching, "_attachments", [])
    with ranks:
        set_config()
        yield set_config


@pytest.fixture
def place() -> Place:
    """A pool with requests in it."""
    return Place()


@pytest.fixture
def attachment(place: Place, configure: Config) -> Iterator[Attachment]:
    """kvtide attached to a decode server whose pool it covers."""
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert found.keeper is not None, found.refusal
    yield found
    found.close()
    assert 0 == found.keeper.arena.used_bytes, "nothing may be left in the arena"
