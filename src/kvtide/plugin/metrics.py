"""Exports a keeper's counts as Prometheus metrics, with an engine's metric types and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from kvtide.plugin.keeper import Keeper
from kvtide.plugin.refusals import REASONS
from kvtide.tier.counts import SpillStats, TierCounts
from kvtide.tier.disk import DiskStats

_COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "retracted_requests": ((), "Retracted requests that kvtide was to save."),
    "saved_requests": ((), "Retracted requests that kvtide saved."),
    "restored_requests": ((), "Retracted requests that kvtide restored."),
    "discarded_requests": ((), "Saved requests that were aborted before they came back."),
    "saved_bytes": ((), "Bytes that kvtide copied off the device."),
    "restored_bytes": ((), "Bytes that kvtide copied back to the device."),
    "save_seconds": ((), "Seconds that the scheduler waited for saves."),
    "restore_seconds": ((), "Seconds that the scheduler waited for restores."),
    "refusals": (
        ("way", "reason"),
        "Requests that kvtide couldn't save, or not restore, by the reason.",
    ),
    "tier_wait_seconds": ((), "Seconds that the scheduler waited for tiers, as a part of these."),
    "read_aheads": (
        ("outcome",),
        "Requests that were read ahead: there when they were wanted (in_time), or not yet (late).",
    ),
    "tier_spills": (("tier",), "Requests that the tier took."),
    "tier_down_bytes": (("tier",), "Bytes of the requests that the tier took."),
    "tier_down_seconds": (("tier",), "Seconds that the tier worked on these."),
    "tier_refusals": (("tier", "reason"), "Requests that the tier didn't take, by the reason."),
    "tier_hits": (("tier",), "Requests that the tier gave back."),
    "tier_up_bytes": (("tier",), "Bytes of the requests that the tier gave back."),
    "tier_up_seconds": (("tier",), "Seconds that the tier worked on these."),
    "tier_misses": (("tier", "reason"), "Requests that the tier didn't give back, by the reason."),
    "tier_damaged": (("tier",), "Requests of which the tier had other bytes than it was given."),
}
"""For each counter, by its name after `kvtide:`: its own labels, and its help text."""

_GAUGES = {
    "arena_used_bytes": "Host memory that saved requests take on this rank.",
    "arena_peak_bytes": "The most that they have taken so far.",
    "arena_limit_bytes": "The most that they may take on this rank.",
    "disk_used_bytes": "Disk space that saved requests take on this rank; 0 without a disk.",
    "disk_peak_bytes": "The most that they have taken so far.",
    "disk_limit_bytes": "The most that they may take on this rank.",
}

_Count = tuple[str, tuple[str, ...], float]
"""A counter's name, the values of its own labels, and its value."""


@final
class Metrics:
    """Shows what a keeper counts, its arena and its tiers. Call `update` after each move."""

    def __init__(self, labels: Mapping[str, Any], counter: Any, gauge: Any) -> None:
        """`labels` are the engine's. `counter` and `gauge` are classes like prometheus_client's."""
        self._labels = dict(labels)
        self._counters = {
            name: counter(f"kvtide:{name}_total", says, labelnames=[*labels, *label_names])
            for name, (label_names, says) in _COUNTERS.items()
        }
        self._gauges = {
            name: gauge(
                f"kvtide:{name}", says, labelnames=list(labels), multiprocess_mode="mostrecent"
            ).labels(**labels)
            for name, says in _GAUGES.items()
        }
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self, keeper: Keeper) -> None:
        """Sets the metrics to the keeper's counts. Those that are still 0 are shown, too."""
        for name, label_values, value in _counts_of(keeper):
            self._advance((name, label_values), value)
        for name, size_bytes in _sizes_of(keeper).items():
            self._gauges[name].set(size_bytes)

    def _advance(self, key: tuple[str, tuple[str, ...]], value: float) -> None:
        if key not in self._series:
            name, label_values = key
            more = dict(zip(_COUNTERS[name][0], label_values, strict=True))
            self._series[key] = self._counters[name].labels(**self._labels, **more)
        step = value - self._seen.get(key, 0)
        if step > 0:
            self._series[key].inc(step)
        self._seen[key] = value


def _counts_of(keeper: Keeper) -> Iterator[_Count]:
    counters = keeper.counters
    yield "retracted_requests", (), counters.retractions
    yield "saved_requests", (), counters.saves
    yield "restored_requests", (), counters.restores
    yield "discarded_requests", (), counters.discards
    yield "saved_bytes", (), counters.saved_bytes
    yield "restored_bytes", (), counters.restored_bytes
    yield "save_seconds", (), counters.save_s
    yield "restore_seconds", (), counters.restore_s
    for reason in REASONS:
        yield "refusals", ("save", reason), counters.refused_saves[reason]
        yield "refusals", ("restore", reason), counters.failed_restores[reason]
    moved = SpillStats() if keeper.spill is None else keeper.spill.stats
    yield "tier_wait_seconds", (), moved.waited_seconds
    yield "read_aheads", ("in_time",), moved.reads_in_time
    yield "read_aheads", ("late",), moved.reads_late
    for tier, counts in moved.tiers.items():
        yield from _counts_of_tier(tier, counts)


def _counts_of_tier(tier: str, counts: TierCounts) -> Iterator[_Count]:
    yield "tier_spills", (tier,), counts.writes
    yield "tier_down_bytes", (tier,), counts.down_bytes
    yield "tier_down_seconds", (tier,), counts.down_seconds
    yield "tier_hits", (tier,), counts.hits
    yield "tier_up_bytes", (tier,), counts.up_bytes
    yield "tier_up_seconds", (tier,), counts.up_seconds
    yield "tier_damaged", (tier,), counts.damaged
    for reason, count in counts.refused_writes.items():
        yield "tier_refusals", (tier, reason), count
    for reason, count in counts.misses.items():
        yield "tier_misses", (tier, reason), count


def _sizes_of(keeper: Keeper) -> Mapping[str, int]:
    arena, store = keeper.arena, keeper.store
    disk = DiskStats() if store is None or store.disk is None else store.disk.stats
    return {
        "arena_used_bytes": arena.used_bytes,
        "arena_peak_bytes": arena.peak_bytes,
        "arena_limit_bytes": arena.limit_bytes,
        "disk_used_bytes": disk.used_bytes,
        "disk_peak_bytes": disk.peak_bytes,
        "disk_limit_bytes": disk.limit_bytes,
    }
