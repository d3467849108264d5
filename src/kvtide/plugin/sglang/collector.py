"""kvtide's counters among SGLang's own, in the scheduler's Prometheus metrics.

They carry SGLang's labels, are exported by its endpoint, and exist with --enable-metrics only, on
the ranks that report: one of the ranks that schedule together, or all of them with
--enable-metrics-for-all-schedulers.
"""

from __future__ import annotations

from typing import Any

from kvtide.plugin.metrics import Metrics


def metrics_of(context: Any) -> Metrics | None:
    """Metrics beside the scheduler's own, or None where SGLang exports none.

    `context` is its SchedulerMetricsCollectorContext. Its collector may stand for another library
    than prometheus_client, which is imported here because SGLang must have set it up before.
    """
    if not context.current_scheduler_metrics_enabled or context.collector is None:
        return None
    from prometheus_client import Counter, Gauge

    collector = context.collector
    return Metrics(
        collector.labels, collector._counter_cls or Counter, collector._gauge_cls or Gauge
    )
