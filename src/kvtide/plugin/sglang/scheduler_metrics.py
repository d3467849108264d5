"""Adds kvtide's counters to SGLang's Prometheus metrics.

They have SGLang's labels and are exported by its endpoint. They exist only with --enable-metrics,
on the ranks that report: a single one of the ranks that schedule in step, or all of them with
--enable-metrics-for-all-schedulers.
"""

from __future__ import annotations

from typing import Any

from kvtide.plugin.metrics import Metrics


def metrics_of(context: Any) -> Metrics | None:
    """The metrics, or None if SGLang exports none.

    `context` is SGLang's SchedulerMetricsCollectorContext; its collector may use another library
    than prometheus_client. The import is here because SGLang must set up prometheus_client first.
    """
    if not context.current_scheduler_metrics_enabled or context.collector is None:
        return None
    from prometheus_client import Counter, Gauge

    collector = context.collector
    return Metrics(
        collector.labels, collector._counter_cls or Counter, collector._gauge_cls or Gauge
    )
