"""HostMemory: divides a host's memory among its ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from kvtide.arena import HostArena, arena_for
from kvtide.arena.budget import default_host_bytes, free_memory_bytes, untouched_bytes_of
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import RankFailed
from kvtide.pool import Pool

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_REFUSED = -1
"""The limit that a rank sends to the others when it refuses its pool."""


@final
class HostMemory:
    """The memory for the arenas of a host's `rank_count` ranks; each arena gets an equal part.

    `limit_bytes` limits all these arenas together; None means a share of the free memory. Each rank
    must ask for its arena exactly once, or refuse, in the same order as the others.
    """

    def __init__(self, limit_bytes: int | None, rank_count: int, ranks: Ranks) -> None:
        self._limit_bytes = limit_bytes
        self._rank_count = rank_count
        self._ranks = ranks

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Tells the other ranks, which ask for their arenas, if the block raises an error."""
        try:
            yield
        except BaseException:
            self.measure(0)
            self._ranks.least(_REFUSED)
            raise

    def arena_for(self, pool: Pool) -> HostArena:
        """This rank's arena. Its limit is the least of the ranks that schedule in step.

        Raises RankFailed if another of these ranks refused its pool.
        """
        limit_bytes = self._ranks.least(self._part_of(pool))
        if limit_bytes < 0:
            name = pool.geometry.layout.name
            raise RankFailed(f"{name}: refused on another rank, whose log says why")
        return arena_for(pool, limit_bytes)

    def measure(self, untouched_bytes: int) -> tuple[int, int]:
        """(untouched, free): bytes that the host's pools will still take, and its free bytes.

        `untouched_bytes` is the number for this rank's pool. All ranks of a host get the same
        result, even if some of them have already written to their pools. First all ranks tell
        their untouched bytes, then all tell the free bytes, and only then does any rank go on and
        take memory. A rank that doesn't take part counts like this rank.
        """
        here = _host_id()
        untouched = [
            said for host, said in self._ranks.gather([here, untouched_bytes]) if host == here
        ]
        others = max(0, self._rank_count - len(untouched))
        free = [
            said for host, said in self._ranks.gather([here, free_memory_bytes()]) if host == here
        ]
        return sum(untouched) + others * untouched_bytes, min(free)

    def _part_of(self, pool: Pool) -> int:
        # Measures even if a limit is set: ranks of other hosts may have none, and wait for all.
        untouched, free = self.measure(untouched_bytes_of(pool.buffers))
        together = self._limit_bytes
        if together is None:
            together = default_host_bytes(untouched, free)
        return together // self._rank_count


def _host_id() -> int:
    """A number that all processes under the same kernel share, in any container."""
    try:
        return zlib.crc32(_BOOT.read_bytes())
    except OSError:
        return 0
