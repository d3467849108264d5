"""StorageCounts: what became of the pages that SGLang asked for or gave."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

from kvtide.plugin.sglang.hicache.moves import HIT, WRITTEN, PageMove

_MOST_SAMPLES = 4096
"""Calls whose sizes are kept for SGLang, which takes them only where metrics are on."""


@final
class StorageCounts:
    """Counts pages by what became of them, and their bytes. Several threads may call it."""

    def __init__(self) -> None:
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

    def to_sglang(self) -> Any:
        """SGLang's StorageMetrics of the calls since the last one of this."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._change:
            reads, writes = self._reads, self._writes
            self._reads, self._writes = [], []
        return StorageMetrics(
            prefetch_pgs=[count for count, _ in reads],
            backup_pgs=[count for count, _ in writes],
            prefetch_bandwidth=[speed for _, speed in reads],
            backup_bandwidth=[speed for _, speed in writes],
        )
