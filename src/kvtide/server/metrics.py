"""The server's metrics, in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtide.serve.stats import EngineStats
from kvtide.server.calls import Call
from kvtide.server.loop import EngineLoop
from kvtide.tier.counts import TierCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TO_FIRST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_PER_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)

_GAUGES = {
    "pool_tokens": "Tokens that the pool has room for.",
    "pool_tokens_used": "Tokens of the pool that requests hold.",
    "host_bytes": "Host memory that KV takes beside the pool.",
    "host_limit_bytes": "The most that it may take.",
    "disk_bytes": "Disk space that KV takes.",
    "disk_limit_bytes": "The most that it may take.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "new_tokens": "Tokens of answers.",
    "retractions": "How often a request gave up its place in the pool.",
    "resumes": "How often a request came back with its KV.",
    "recomputed_tokens": "Tokens whose KV was lost, and computed again.",
    "tier_wait_seconds": "Seconds that the engine waited for tiers.",
}
_MOVED = {
    "off": ("offloaded_bytes", "offload_seconds"),
    "back": ("restored_bytes", "restore_seconds"),
}


@final
class ServerMetrics:
    """What a server counts, and the counts of its engine. For the asyncio loop's thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineMetrics(loop))
        self._responses = Counter(
            "kvtide:responses",
            "Responses, by route and status.",
            ("route", "status"),
            registry=self._registry,
        )
        self._to_first = Histogram(
            "kvtide:time_to_first_token_seconds",
            "From a call's arrival to the first new token of its answer.",
            buckets=_TO_FIRST_S,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "kvtide:time_per_token_seconds",
            "Between two tokens of an answer, on average over the answer.",
            buckets=_PER_TOKEN_S,
            registry=self._registry,
        )

    def note_response(self, route: str, status: int) -> None:
        """Counts a response. `route` is a path of the server's own, not a client's."""
        self._responses.labels(route, str(status)).inc()

    def note_end(self, call: Call) -> None:
        """Counts the answers of a call that has ended."""
        for progress in call.progress:
            if progress.first_at is None or progress.last_at is None or not progress.has_ended:
                continue
            self._to_first.observe(progress.first_at - call.came_at)
            if progress.new_count > 1:
                seconds = progress.last_at - progress.first_at
                self._per_token.observe(seconds / (progress.new_count - 1))

    def text(self) -> bytes:
        """All metrics at this moment, as Prometheus reads them."""
        return generate_latest(self._registry)


@final
class _EngineMetrics(Collector):
    """The engine's counts after its last step."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        stats = self._loop.stats
        for name, says in _GAUGES.items():
            yield GaugeMetricFamily(f"kvtide:{name}", says, getattr(stats, name))
        for name, says in _COUNTERS.items():
            yield CounterMetricFamily(f"kvtide:{name}", says, getattr(stats, name))
        failures = self._loop.failures
        yield CounterMetricFamily(
            "kvtide:failed_steps", "Steps of the engine that failed, and orders to it.", failures
        )
        states = {"running": stats.running, "waiting": stats.waiting, "retracted": stats.retracted}
        yield _labelled(GaugeMetricFamily, "requests", "Requests by state.", "state", states)
        aborted = self._loop.aborted
        ended = {"done": stats.done - aborted, "aborted": aborted, "failed": stats.failed}
        yield _labelled(CounterMetricFamily, "ended_requests", "Ended requests.", "how", ended)
        says = "Tokens of prompts that weren't computed, by where their KV was."
        yield _labelled(CounterMetricFamily, "cached_tokens", says, "place", stats.cached_tokens)
        says = "Requests whose KV couldn't be kept or brought back, by the reason."
        yield _labelled(CounterMetricFamily, "misses", says, "reason", stats.misses)
        yield from _moves(stats)
        yield from _tiers(stats.tiers)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    says: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    metric = family(f"kvtide:{name}", says, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _moves(stats: EngineStats) -> Iterator[Metric]:
    """What moved between the pool and host memory."""
    for kind, says in enumerate(("Bytes of KV that moved", "Seconds that moves of KV took")):
        unit = ("bytes", "seconds")[kind]
        values = {way: getattr(stats, names[kind]) for way, names in _MOVED.items()}
        yield _labelled(
            CounterMetricFamily, f"moved_{unit}", f"{says} off the pool, and back.", "way", values
        )


def _tiers(tiers: Mapping[str, TierCounts]) -> Iterator[Metric]:
    """What each tier took and gave back: names and meanings are those of the plugins' metrics."""
    for name, says in (
        ("down_bytes", "Bytes of the snapshots that the tier took."),
        ("down_seconds", "Seconds that the tier worked on these."),
        ("up_bytes", "Bytes of the snapshots that the tier gave back."),
        ("up_seconds", "Seconds that the tier worked on these."),
        ("hits", "Snapshots that the tier gave back."),
        ("damaged", "Snapshots of which the tier had other bytes than it was given."),
    ):
        values = {tier: getattr(counts, name) for tier, counts in tiers.items()}
        yield _labelled(CounterMetricFamily, f"tier_{name}", says, "tier", values)
    for name, field, says in (
        ("tier_misses", "misses", "Snapshots that the tier didn't give back, by the reason."),
        ("tier_refusals", "refused_writes", "Snapshots that the tier didn't take, by the reason."),
    ):
        metric = CounterMetricFamily(f"kvtide:{name}", says, labels=["tier", "reason"])
        for tier, counts in tiers.items():
            for reason, count in getattr(counts, field).items():
                metric.add_metric([tier, reason], count)
        yield metric
