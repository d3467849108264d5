"""Watches a store's moves: keeps the bytes of all saved blocks, and compares after each load.

Before a load its target is overwritten, so that bytes which were there anyway prove nothing.
"""

from __future__ import annotations

from typing import Any, final

import torch

POISON = 0xA5


@final
class WatchedMoves:
    """Stands between vLLM and a BlockStore whose moves have ended when a call returns (CPU)."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._saved: dict[bytes, list[bytes]] = {}
        self.compared = 0
        """How many loaded blocks had the bytes that were saved; all others stayed as they were."""
        self.skips_loads = False
        """Whether loads only seem to happen: the control, in which answers must be wrong."""
        self._save, self._load = store.save, store.load
        store.save, store.load = self.save, self.load

    def save(self, job_id: int, groups: Any, *rest: Any) -> None:
        """Keeps the bytes of the blocks that are saved."""
        for group, pairs in zip(self._store._groups, groups, strict=True):
            for key, block in pairs:
                self._saved[key] = _bytes_of(group, block)
        self._save(job_id, groups, *rest)

    def load(self, job_id: int, groups: Any) -> None:
        """Overwrites the targets, lets the store load, and compares."""
        for group, pairs in zip(self._store._groups, groups, strict=True):
            for _, block in pairs:
                for buffer in _rows(group):
                    buffer[block].fill_(POISON)
        before = [[buffer.clone() for buffer in _rows(group)] for group in self._store._groups]
        if self.skips_loads:
            self._load(job_id, [[] for _ in groups])
            return
        self._load(job_id, groups)
        self._store.wait([job_id])
        if self._store._moves[job_id].has_failed or _has_error(self._store._moves[job_id]):
            return
        for group, pairs in zip(self._store._groups, groups, strict=True):
            for key, block in pairs:
                assert self._saved[key] == _bytes_of(group, block), f"block {block} has other bytes"
                self.compared += 1
        self._compare_others(groups, before)

    def _compare_others(self, groups: Any, before: list[list[torch.Tensor]]) -> None:
        """Blocks that no group of this load has must be as they were."""
        loaded = {block for pairs in groups for _, block in pairs}
        for group, kept in zip(self._store._groups, before, strict=True):
            for buffer, old in zip(_rows(group), kept, strict=True):
                others = [block for block in range(len(buffer)) if block not in loaded]
                assert torch.equal(buffer[others], old[others])


def _rows(group: Any) -> list[torch.Tensor]:
    """The blocks of each layer of a group, [block, byte]."""
    planes = group.pool.geometry.planes
    return [
        group.pool.plane(plane.name, layer).view(torch.uint8)
        for plane in planes
        for layer in range(plane.layer_count)
    ]


def _bytes_of(group: Any, block: int) -> list[bytes]:
    return [buffer[block].numpy().tobytes() for buffer in _rows(group)]


def _has_error(move: Any) -> bool:
    for part in move.parts:
        try:
            part.job.wait()
        except Exception:
            return True
    return False
