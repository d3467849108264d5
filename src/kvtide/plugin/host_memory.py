"""The host memory that a server's ranks share: how much of it all of them together leave free."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvtide.arena.budget import default_host_bytes, free_memory_bytes, untouched_bytes_of
from kvtide.plugin.sglang.settings import Settings
from kvtide.pool import Pool

Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Gives what each of the ranks that schedule on common hosts says, to all of them."""
Measure = Callable[[int], tuple[int, int]]
"""From a rank's bytes that its pool hasn't taken yet to those of the host's ranks together, and
the bytes that are free there."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def limit_bytes_of(pool: Pool, settings: Settings, measure: Measure) -> int:
    """This rank's part of what the arenas of the host's ranks may take together."""
    # Whatever was set: a rank of another host, where less may be set, waits for all the others.
    untouched, free = measure(untouched_bytes_of(pool))
    together = settings.host_memory_bytes
    if together is None:
        together = default_host_bytes(untouched, free)
    return together // settings.rank_count


def measure_with(gather: Gather, rank_count: int) -> Measure:
    """The same answer for each of a host's ranks, whoever of them has written to its pool already.

    All ranks must ask, in the same order. No rank says what is free before all have said what their
    pools have yet to take, and none goes on, and takes memory, before all have said that. Of the
    `rank_count` ranks of the host those that don't take part count as this one does.
    """

    def measure(untouched_bytes: int) -> tuple[int, int]:
        here = _host_id()
        untouched = [said for host, said in gather([here, untouched_bytes]) if host == here]
        others = max(0, rank_count - len(untouched))
        free = [said for host, said in gather([here, free_memory_bytes()]) if host == here]
        return sum(untouched) + others * untouched_bytes, min(free)

    return measure


def gather_among(group: torch.distributed.ProcessGroup) -> Gather:
    """A `Gather` among the ranks of a group that talks over the CPU."""
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return gather_alone

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        said = torch.tensor(numbers, dtype=torch.int64)
        heard = [torch.empty_like(said) for _ in range(size)]
        torch.distributed.all_gather(heard, said, group=group)
        return [one.tolist() for one in heard]

    return gather


def gather_alone(numbers: Sequence[int]) -> list[Sequence[int]]:
    """A `Gather` of one."""
    return [numbers]


def _host_id() -> int:
    """One number for all processes under one kernel, in whatever container they are."""
    try:
        return zlib.crc32(_BOOT.read_bytes())
    except OSError:
        return 0
