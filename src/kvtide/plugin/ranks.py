"""Ranks: lets the processes of a server that share requests agree on an answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Group = torch.distributed.ProcessGroup


class Ranks:
    """This rank and the ranks that share requests with it. All must call the same, in order.

    `in_step` has the process groups of the ranks that schedule in step: each of them has a share of
    each request. `on_hosts` is the process group of all ranks that may be on the same host. The
    groups communicate over the CPU. Without groups this rank is alone.
    """

    def __init__(self, in_step: Sequence[Group] = (), on_hosts: Group | None = None) -> None:
        self._in_step = [group for group in in_step if _size(group) > 1]
        self._on_hosts = on_hosts if on_hosts is not None and _size(on_hosts) > 1 else None

    def agree(self, went_well: bool) -> bool:
        """Whether `went_well` is true on every rank that schedules in step."""
        return bool(self.least(int(went_well)))

    def least(self, value: int) -> int:
        """The least `value` of the ranks that schedule in step."""
        for group in self._in_step:
            on_host = torch.tensor([value], dtype=torch.int64)
            torch.distributed.all_reduce(on_host, torch.distributed.ReduceOp.MIN, group=group)
            value = int(on_host.item())
        return value

    def gather(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """The numbers of each rank in `on_hosts`; all ranks give equally many."""
        if self._on_hosts is None:
            return [numbers]
        said = torch.tensor(numbers, dtype=torch.int64)
        heard = [torch.empty_like(said) for _ in range(_size(self._on_hosts))]
        torch.distributed.all_gather(heard, said, group=self._on_hosts)
        return [answer.tolist() for answer in heard]


def _size(group: Group) -> int:
    return torch.distributed.get_world_size(group)
