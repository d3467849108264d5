"""open_keeper: a keeper over the pools of a rank of SGLang's, the target's and the draft's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtide.device import Device, open_device
from kvtide.errors import KvtideError
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
    """A keeper of the subject's pool and the draft model's, which share its slots.

    All `ranks` say what they leave of the host's memory, and then agree on the least that a rank
    has for its arena, whether this rank refuses or not. A draft pool that is refused is left out:
    the keeper's `draft_refusal` says why. `is_ahead`: see SGLangRequests. Raises Refused,
    LayoutError where the pool's tensors can't be copied exactly, RankFailed where another rank
    refused; nothing is held then.
    """
    if not isinstance(getattr(subject.request_pool, "req_to_token", None), torch.Tensor):
        name = type(subject.request_pool).__name__
        raise Refused(f"{name} has no table 'req_to_token': where a request lies isn't known")
    ranks = ranks or Ranks()
    memory = HostMemory(settings.host_memory_bytes, settings.rank_count, ranks)
    device = open_device(torch.device(subject.pool.device).type)
    try:
        with memory.refusing_together():
            description, pool, draft_refusal = _adopt(subject, draft_pools, device)
        requests = SGLangRequests(subject.request_pool, description, pool.request_kinds, is_ahead)
        keeper = Keeper(description, Tide(pool, memory.arena_for(pool)), requests, ranks)
    except BaseException:
        device.close()
        raise
    keeper.draft_refusal = draft_refusal
    return keeper


def _adopt(
    subject: Subject, draft_pools: Sequence[Any], device: Device
) -> tuple[Description, Pool, str]:
    """The target's pool and the draft's as one, or the target's alone and why."""
    refusal = ""
    if draft_pools:
        try:
            description = describe_with_draft(subject, draft_pools)
            return description, description.adopt(device), ""
        except KvtideError as error:
            refusal = str(error)
    description = describe(subject)
    return description, description.adopt(device), refusal
