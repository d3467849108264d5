"""kvtide's counters are beside SGLang's, and ranks come to one answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import two_ranks
from prometheus_client import CollectorRegistry, Counter, Gauge
from requests_of import Place, keeper_over

from kvtide.errors import ArenaFull
from kvtide.plugin.sglang.scheduler_metrics import metrics_of
from kvtide.plugin.sglang.settings import Settings

LABELS = {"model_name": "tiny", "tp_rank": 0}


def context(registry: CollectorRegistry | None, *, is_reporting: bool = True) -> Any:
    """Makes a scheduler's metrics as SGLang has them, kept in `registry`."""

    def kind(metric: Any) -> Any:
        return lambda *args, **kwargs: metric(*args, **kwargs, registry=registry)

    collector = SimpleNamespace(labels=LABELS, _counter_cls=kind(Counter), _gauge_cls=kind(Gauge))
    return SimpleNamespace(
        current_scheduler_metrics_enabled=is_reporting,
        collector=None if registry is None else collector,
    )


def test_metrics_follow_the_keeper() -> None:
    """The metrics are of SGLang's classes, which another library may have replaced."""
    place, registry = Place(), CollectorRegistry()
    settings = Settings(host_memory_bytes=200_000)
    keeper = keeper_over(place.allocator, place.request_pool, [], settings)
    metrics = metrics_of(context(registry))
    assert metrics is not None
    keeper.follow(metrics.update)

    def value(name: str, **more: str) -> float | None:
        labels = {"model_name": "tiny", "tp_rank": "0", **more}
        found: float | None = registry.get_sample_value(f"kvtide:{name}", labels)
        return found

    assert (0, 200_000) == (value("saved_requests_total"), value("arena_limit_bytes"))
    req = place.admit("a", 11)
    backup = keeper.save(req)
    assert (1, keeper.arena.used_bytes) == (
        value("saved_requests_total"),
        value("arena_used_bytes"),
    )
    keeper.restore(req, backup)
    assert (3840, 3840) == (value("saved_bytes_total"), value("restored_bytes_total"))
    lease = keeper.arena.lease(keeper.arena.limit_bytes // keeper.arena.block_bytes)
    for _ in range(2):
        with pytest.raises(ArenaFull):
            keeper.save(req)
    assert 2 == value("refusals_total", way="save", reason="arena_full")
    assert (3, 1) == (value("retracted_requests_total"), value("restored_requests_total"))
    assert 0 == value("refusals_total", way="restore", reason="damaged")
    lease.release()
    keeper.close()


def test_a_rank_that_does_not_report_has_no_metrics() -> None:
    """SGLang does the same without --enable-metrics, and beside the rank that reports for all."""
    assert metrics_of(context(None)) is None
    assert metrics_of(context(CollectorRegistry(), is_reporting=False)) is None


def test_ranks_that_schedule_in_step_are_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the smallest of their values, however large these are, and whatever groups exist."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")  # SGLang isn't imported there
    asked = [[1, 1, 1 << 40, -1], [1, 0, 1 << 41, 5]]
    assert [[1, 0, 1 << 40, -1]] * 2 == two_ranks.ask(asked, tmp_path)
