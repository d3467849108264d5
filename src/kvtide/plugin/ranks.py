"""Ranks: how the processes of a server that hold shares of the same requests come to one answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Group = torch.distributed.ProcessGroup


class Ranks:
    """This rank among the others. All of them must ask the same, in the same order.

    `in_step` are the groups of ranks that schedule the same requests together: each request has a
    share on all of them. `on_hosts` is the group of all ranks that may have a host in common. The
    groups talk over the CPU. Without groups this rank is alone.
    """

    def __init__(self, in_step: Sequence[Group] = (), on_hosts: Group | None = None) -> None:
        self._in_step = [group for group in in_step if _size(group) > 1]
        self._on_hosts = on_hosts if on_hosts is not None and _size(on_hosts) > 1 else None

    def agree(self, went_well: bool) -> bool:
        """Whether it went well on this rank and on every rank that schedules together with it."""
        return bool(self.least(int(went_well)))

    def least(self, value: int) -> int:
        """The least `value` that any of the ranks that schedule together gives."""
        for group in self._in_step:
            on_host = torch.tensor([value], dtype=torch.int64)
            torch.distributed.all_reduce(on_host, torch.distributed.ReduceOp.MIN, group=group)
            value = int(on_host.item())
        return value

    def gather(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """The numbers that each rank of `on_hosts` gives. All ranks must give equally many."""
        if self._on_hosts is None:
            return [numbers]
        said = torch.tensor(numbers, dtype=torch.int64)
        heard = [torch.empty_like(said) for _ in range(_size(self._on_hosts))]
        torch.distributed.all_gather(heard, said, group=self._on_hosts)
        return [answer.tolist() for answer in heard]


def _size(group: Group) -> int:
    return torch.distributed.get_world_size(group)
