"""Two ranks of a server, as far as they have to agree: two processes that use gloo.

They are forked from a process that has imported torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed
from torch import multiprocessing

from kvtide.plugin.ranks import Ranks


def ask(values: list[list[int]], folder: Path) -> list[list[int]]:
    """Asks the ranks to agree on these values one after another, and returns what each is told."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    ranks = [context.Process(target=_rank, args=(rank, values, str(folder))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    texts = [(folder / str(rank)).read_text() for rank in range(2)]
    return [[int(value) for value in text.split()] for text in texts]


def _rank(rank: int, values: list[list[int]], folder: str) -> None:
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", meeting, world_size=2, rank=rank)
    alone: Any = torch.distributed.new_group([0])
    both: Any = torch.distributed.new_group([0, 1])
    ranks = Ranks([both] if rank else [alone, both])
    told = [ranks.least(value) for value in values[rank]]
    (Path(folder) / str(rank)).write_text(" ".join(map(str, told)))
    torch.distributed.destroy_process_group()
