"""HostMemory: what the ranks of a host may take of its memory, all of them together."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from kvtide.arena import HostArena
from kvtide.arena.budget import default_host_bytes, free_memory_bytes, untouched_bytes_of
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import RankFailed
from kvtide.pool import Pool
from kvtide.transfer import chunk_bytes_for

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_REFUSED = -1
"""What a rank says of its limit when it refuses its pool."""


@final
class HostMemory:
    """The memory that the arenas of a host's `rank_count` ranks share in equal parts.

    `limit_bytes` is the limit of all these arenas together; None means a part of what is free. Each
    rank must ask for its arena exactly once, or refuse, in the same order as the others.
    """

    def __init__(self, limit_bytes: int | None, rank_count: int, ranks: Ranks) -> None:
        self._limit_bytes = limit_bytes
        self._rank_count = rank_count
        self._ranks = ranks

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Put code that may refuse a pool in this context: after an error in it, the other ranks,
        which wait in `arena_for`, are told."""
        try:
            yield
        except BaseException:
            self.measure(0)
            self._ranks.least(_REFUSED)
            raise

    def arena_for(self, pool: Pool) -> HostArena:
        """This rank's arena, as large as the smallest among the ranks that schedule together.

        Raises RankFailed where another of these ranks refused its pool.
        """
        limit_bytes = self._ranks.least(self._part_of(pool))
        if limit_bytes < 0:
            name = pool.geometry.layout.name
            raise RankFailed(f"{name}: refused on another rank, whose log says why")
        block_bytes = chunk_bytes_for(pool, limit_bytes)
        return HostArena(pool.device, limit_bytes=limit_bytes, block_bytes=block_bytes)

    def measure(self, untouched_bytes: int) -> tuple[int, int]:
        """The bytes that the pools of a host's ranks have yet to take, and the bytes free there.

        `untouched_bytes` is what this rank's pool has yet to take. All ranks of a host get the same
        two numbers, whichever of them have written to their pools already. First all ranks say what
        their pools have yet to take, then all say what is free, and only then does any rank take
        memory. A rank of the host that doesn't take part is counted with this rank's number.
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
        # Also with a limit that was set: ranks of other hosts may have none, and wait for this one.
        untouched, free = self.measure(untouched_bytes_of(pool.buffers))
        together = self._limit_bytes
        if together is None:
            together = default_host_bytes(untouched, free)
        return together // self._rank_count


def _host_id() -> int:
    """One number for all processes under one kernel, in whatever container they are."""
    try:
        return zlib.crc32(_BOOT.read_bytes())
    except OSError:
        return 0
