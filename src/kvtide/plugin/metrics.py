"""Exports a keeper's counters as Prometheus metrics, with an engine's metric types and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from kvtide.plugin.keeper import Keeper
from kvtide.plugin.refusals import REASONS

_TOTALS = {
    "retractions": ("retracted_requests", "Retracted requests that kvtide was to save."),
    "saves": ("saved_requests", "Retracted requests that kvtide saved."),
    "restores": ("restored_requests", "Retracted requests that kvtide restored."),
    "discards": ("discarded_requests", "Saved requests that were aborted before they came back."),
    "saved_bytes": ("saved_bytes", "Bytes that kvtide copied off the device."),
    "restored_bytes": ("restored_bytes", "Bytes that kvtide copied back to the device."),
    "save_s": ("save_seconds", "Seconds that the scheduler waited for saves."),
    "restore_s": ("restore_seconds", "Seconds that the scheduler waited for restores."),
}
"""For each counter of the keeper: the metric's name after `kvtide:`, and its help text."""


@final
class Metrics:
    """Shows a keeper's counters and its arena. Call `update` after each move."""

    def __init__(self, labels: Mapping[str, Any], counter: Any, gauge: Any) -> None:
        """`labels` are the engine's. `counter` and `gauge` are classes like prometheus_client's."""
        self._labels = dict(labels)
        names = list(labels)
        self._totals = {
            field: counter(f"kvtide:{name}_total", says, labelnames=names).labels(**labels)
            for field, (name, says) in _TOTALS.items()
        }
        refusals = counter(
            "kvtide:refusals_total",
            "Requests that kvtide couldn't save, or not restore, by the reason.",
            labelnames=[*names, "way", "reason"],
        )
        self._refusals = {
            (way, reason): refusals.labels(**labels, way=way, reason=reason)
            for way in ("save", "restore")
            for reason in REASONS
        }
        self._used, self._limit = (
            gauge(
                f"kvtide:arena_{name}_bytes",
                says,
                labelnames=names,
                multiprocess_mode="mostrecent",
            ).labels(**labels)
            for name, says in (
                ("used", "Host memory that saved requests take on this rank."),
                ("limit", "The most that they may take on this rank."),
            )
        )
        self._seen: dict[Any, float] = {}

    def update(self, keeper: Keeper) -> None:
        """Sets the metrics to the keeper's counts."""
        counters = keeper.counters
        for field, total in self._totals.items():
            self._advance(total, field, getattr(counters, field))
        for (way, reason), total in self._refusals.items():
            counts = counters.refused_saves if way == "save" else counters.failed_restores
            self._advance(total, (way, reason), counts[reason])
        self._used.set(keeper.arena.used_bytes)
        self._limit.set(keeper.arena.limit_bytes)

    def _advance(self, total: Any, key: Any, value: float) -> None:
        step = value - self._seen.get(key, 0)
        if step > 0:
            total.inc(step)
        self._seen[key] = value
