"""StorageCounts: what became of the pages that SGLang asked for or gave."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

from kvtide.plugin.sglang.hicache.moves import HIT, WRITTEN, PageMove

_MOST_SAMPLES = 4096
"""Calls whose sizes are kept for SGLang, which takes them only where metrics are on."""


@final
class StorageCounts:
    """Counts pages by what became of them, and their bytes. Several threads may call it."""

    def __init__(self, shard: str = "") -> None:
        """`shard` is the rank's part of the KV, in words, for metrics."""
        self._shard = shard
        self._shown: Counter[tuple[int, str]] = Counter()
        self._change = threading.Lock()
        self.pages: Counter[str] = Counter()
        """How many pages had each outcome of `moves.OUTCOMES`."""
        self.read_bytes = 0
        self.written_bytes = 0
        self._reads: list[tuple[int, float]] = []
        self._writes: list[tuple[int, float]] = []

    def counted(
        self, way: Callable[[Sequence[PageMove]], list[str]], moves: Sequence[PageMove]
    ) -> list[str]:
        """The outcomes of a call of PageMoves, which are noted."""
        started = time.perf_counter()
        outcomes = way(moves)
        seconds = time.perf_counter() - started
        sizes = [(move.pages.size_bytes, end) for move, end in zip(moves, outcomes, strict=True)]
        with self._change:
            self.pages.update(outcomes)
            for good, samples in ((HIT, self._reads), (WRITTEN, self._writes)):
                moved = [size_bytes for size_bytes, end in sizes if end == good]
                if moved and len(samples) < _MOST_SAMPLES:
                    samples.append((len(moved), sum(moved) / 1e9 / max(seconds, 1e-9)))
            self.read_bytes += sum(size_bytes for size_bytes, end in sizes if end == HIT)
            self.written_bytes += sum(size_bytes for size_bytes, end in sizes if end == WRITTEN)
        return outcomes

    def _show(self) -> None:
        """Advances the metrics to the counts."""
        sizes = {"read": self.read_bytes, "written": self.written_bytes}
        for place, (metric, counts) in enumerate(zip(_metrics(), (self.pages, sizes), strict=True)):
            for name, count in counts.items():
                metric.labels(shard=self._shard, what=name).inc(count - self._shown[place, name])
                self._shown[place, name] = count

    def to_sglang(self) -> Any:
        """SGLang's StorageMetrics of the calls since the last one of this."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._change:
            reads, writes = self._reads, self._writes
            self._reads, self._writes = [], []
            self._show()
        return StorageMetrics(
            prefetch_pgs=[count for count, _ in reads],
            backup_pgs=[count for count, _ in writes],
            prefetch_bandwidth=[speed for _, speed in reads],
            backup_bandwidth=[speed for _, speed in writes],
        )


@cache
def _metrics() -> tuple[Any, Any]:
    """Counters of pages and of bytes. A process has them once, however often SGLang attaches."""
    # Not at the top: SGLang must have set up prometheus_client before.
    from prometheus_client import Counter as Metric

    labels = ["shard", "what"]
    return (
        Metric("kvtide:hicache_pages_total", "Pages by what became of them.", labels),
        Metric("kvtide:hicache_bytes_total", "Bytes of pages that were read or written.", labels),
    )
