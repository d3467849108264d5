"""open_keeper: makes a keeper for the pools of a rank, the target's and the draft model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtide.device import Device, open_device
from kvtide.errors import KvtideError
from kvtide.plugin.below import open_store
from kvtide.plugin.description import Description
from kvtide.plugin.host_memory import HostMemory
from kvtide.plugin.keeper import Keeper
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.draft_model import describe_with_draft
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.requests import SGLangRequests
from kvtide.plugin.sglang.settings import Settings
from kvtide.pool import Pool
from kvtide.tide import Tide

READS: Table = {"KVCache": ("device",)}


def open_keeper(
    subject: Subject,
    draft_pools: Sequence[Any],
    settings: Settings,
    ranks: Ranks | None = None,
    is_ahead: Callable[[Any], bool] = lambda req: False,
) -> Keeper:
    """Makes a keeper for the subject's pool and for draft pools, which share its slots.

    All `ranks` take part in dividing the host's memory, even if this rank refuses; the arenas get
    the least share of a rank. A refused draft pool is left out, and the keeper's `draft_refusal`
    says why. `is_ahead`: see SGLangRequests. Raises Refused, LayoutError if the pool's tensors
    can't be copied exactly, RankFailed if another rank refused. After an error nothing stays open.
    """
    if not isinstance(getattr(subject.request_pool, "req_to_token", None), torch.Tensor):
        name = type(subject.request_pool).__name__
        raise Refused(f"{name} has no table 'req_to_token', so the slots of requests are unknown")
    ranks = ranks or Ranks()
    memory = HostMemory(settings.host_memory_bytes, settings.rank_count, ranks)
    device = open_device(torch.device(subject.pool.device).type)
    try:
        with memory.refusing_together():
            description, pool, draft_refusal = _adopt(subject, draft_pools, device)
        requests = SGLangRequests(subject.request_pool, description, pool.request_kinds, is_ahead)
        store = open_store(memory.arena_for(pool), settings.below, settings.rank_count)
        tide = Tide(pool, store.arena, spill=store.spill)
        keeper = Keeper(description, tide, requests, ranks, store)
    except BaseException:
        device.close()
        raise
    keeper.draft_refusal = draft_refusal
    return keeper


def _adopt(
    subject: Subject, draft_pools: Sequence[Any], device: Device
) -> tuple[Description, Pool, str]:
    """The target's pool with the draft pools, or without them and the reason."""
    refusal = ""
    if draft_pools:
        try:
            description = describe_with_draft(subject, draft_pools)
            return description, description.adopt(device), ""
        except KvtideError as error:
            refusal = str(error)
    description = describe(subject)
    return description, description.adopt(device), refusal
