"""kvtide's counters are beside SGLang's, and ranks come to one answer."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import two_ranks
from prometheus_client import CollectorRegistry, Counter, Gauge
from requests_of import Place, keeper_over, read_ahead

from kvtide.errors import ArenaFull, SnapshotMiss
from kvtide.plugin import keeper as keeping
from kvtide.plugin.environment import Below
from kvtide.plugin.sglang.scheduler_metrics import metrics_of
from kvtide.plugin.sglang.settings import Settings

DOCS = Path(__file__).parents[3] / "docs" / "sglang.md"
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
    lease = keeper.arena.lease(keeper.arena.block_count)
    for _ in range(2):
        with pytest.raises(ArenaFull):
            keeper.save(req)
    assert 2 == value("refusals_total", way="save", reason="arena_full")
    assert (3, 1) == (value("retracted_requests_total"), value("restored_requests_total"))
    assert 0 == value("refusals_total", way="restore", reason="damaged")
    lease.release()
    keeper.close()


def test_what_tiers_do_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and seconds are counted down and up, and every count is there before it is needed."""
    monkeypatch.setattr(keeping, "_TELL_S", 0.0)
    place, registry = Place(), CollectorRegistry()
    settings = Settings(host_memory_bytes=2 << 16, below=Below(tmp_path / "kv", 1 << 20))
    keeper = keeper_over(place.allocator, place.request_pool, [], settings)
    metrics = metrics_of(context(registry))
    assert metrics is not None
    keeper.follow(metrics.update)

    def value(name: str, **more: str) -> float:
        labels = {"model_name": "tiny", "tp_rank": "0", **more}
        found: float | None = registry.get_sample_value(f"kvtide:{name}", labels)
        assert found is not None, name
        return found

    size_bytes = 10 * keeper.token_bytes
    assert 0 == value("tier_spills_total", tier="disk") == value("disk_used_bytes")
    reqs = [place.admit(f"r{number}", 11, number) for number in range(1, 6)]
    backups = [keeper.save(req) for req in reqs]
    spills = value("tier_spills_total", tier="disk")
    assert spills >= 3
    assert spills * size_bytes == value("tier_down_bytes_total", tier="disk")
    assert value("tier_down_seconds_total", tier="disk") > 0
    assert 0 == value("tier_hits_total", tier="disk")
    assert 0 < value("disk_used_bytes") <= value("disk_peak_bytes") <= value("disk_limit_bytes")
    assert 1 << 20 == value("disk_limit_bytes")
    assert 2 << 16 >= value("arena_peak_bytes") == 2 * keeper.arena.block_bytes
    read_ahead(keeper, backups)
    assert 1 == value("tier_hits_total", tier="disk")
    for path in (tmp_path / "kv").rglob("*.safetensors"):
        path.unlink()
    lost = 0
    for req, backup in zip(reqs, backups, strict=True):
        try:
            keeper.restore(req, backup)
        except SnapshotMiss:
            lost += 1
    assert lost >= 2
    assert 1 == value("tier_hits_total", tier="disk")
    assert size_bytes == value("tier_up_bytes_total", tier="disk")
    assert value("tier_up_seconds_total", tier="disk") > 0
    assert 1 == value("read_aheads_total", outcome="in_time")
    assert 0 == value("read_aheads_total", outcome="late")
    assert value("tier_wait_seconds_total") > 0
    for reason in ("gone", "away", "late"):
        expected = lost if reason == "gone" else 0
        assert expected == value("tier_misses_total", tier="disk", reason=reason)
    for reason in ("full", "away", "late"):
        assert 0 == value("tier_refusals_total", tier="disk", reason=reason)
    assert 0 == value("tier_damaged_total", tier="disk")
    keeper.close()


def test_the_documentation_names_every_metric() -> None:
    """It names no other, and for each the labels that aren't SGLang's."""
    registry = CollectorRegistry()
    metrics = metrics_of(context(registry))
    assert metrics is not None
    place = Place()
    keeper = keeper_over(place.allocator, place.request_pool)
    metrics.update(keeper)
    keeper.close()
    shown = {family.name + "_total" * (family.type == "counter") for family in registry.collect()}
    text = DOCS.read_text("utf-8")
    table = text[text.index("| metric |") : text.index("| reason |")]
    assert sorted(shown) == sorted(re.findall(r"`(kvtide:\w+)`", table))


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
