"""Requests and a scheduler over a real pool, with all that kvtide reads of SGLang's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvtide.conformance.tensors import same_bytes
from kvtide.plugin.keeper import Backup, Keeper
from kvtide.plugin.sglang.attachment import Attachment
from kvtide.plugin.sglang.cases.keys_values import mha
from kvtide.plugin.sglang.open_keeper import open_keeper
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.settings import Settings

STEPS = 10_000
"""So many steps of a millisecond are enough for any disk."""
SETTINGS = Settings(host_memory_bytes=1 << 20)
ALONE = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "attn_dp_enabled": False,
    "attn_tp_rank": 0,
}
Config = Callable[..., None]


class ReqKvInfo:
    """Stands for SGLang's Req.kv, which describes a request's memory."""

    def __init__(self, row: int, mamba: int | None) -> None:
        self.req_pool_idx = row
        self.mamba_pool_idx = None if mamba is None else torch.tensor(mamba)
        self.retraction_backup: Any = None


class Req:
    """A request with `seqlen` tokens, of which the last one has no KV yet."""

    def __init__(self, rid: str, seqlen: int, row: int = 1, mamba: int | None = None) -> None:
        self.rid = rid
        self.seqlen = seqlen
        self.kv = ReqKvInfo(row, mamba)
        self.return_logprob = False


class ReqToTokenPool:
    """The slots of each request, [row, token]."""

    def __init__(self) -> None:
        self.req_to_token = torch.full((8, 256), -1, dtype=torch.int32)

    def place(self, req: Req, slots: torch.Tensor) -> None:
        """Gives the request these slots."""
        self.req_to_token[req.kv.req_pool_idx, : len(slots)] = slots.int()


class Scheduler:
    """A scheduler with all that kvtide reads of SGLang's; `more` are further attributes."""

    def __init__(self, allocator: Any, request_pool: Any, **more: Any) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.req_to_token_pool = request_pool
        self.tree_cache: Any = object()
        self.draft_worker = self.sliding_window_size = None
        self.attn_tp_cpu_group = self.attn_cp_cpu_group = self.tp_cpu_group = object()
        self.metrics_collector_context = SchedulerMetricsCollectorContext()
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, logprob: None)
        vars(self).update(more)


class SchedulerMetricsCollectorContext:
    """The metrics of a server without --enable-metrics."""

    current_scheduler_metrics_enabled = False
    collector = None


class Place:
    """A pool of keys and values with its allocator, and requests in it."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(7)
        self.pool, self.allocator = mha(**{"page_size": 1, **options})
        self.request_pool = ReqToTokenPool()
        for buffer in self.buffers:
            buffer.normal_()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of all layers, [slot, head, head_dim]."""
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def admit(self, rid: str, seqlen: int, row: int = 1, **more: Any) -> Req:
        """Makes a request with its own slots for all but its last token."""
        req = Req(rid, seqlen, row, **more)
        self.request_pool.place(req, self.allocator.alloc(seqlen - 1))
        return req

    def readmit(self, req: Req, row: int = 2) -> None:
        """Gives the request other slots, in another row."""
        req.kv.req_pool_idx = row
        self.request_pool.place(req, self.allocator.alloc(req.seqlen - 1))

    def rows_of(self, req: Req) -> list[torch.Tensor]:
        """Copies the content of the request's slots."""
        row = self.request_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1].long()
        return [buffer[row].clone() for buffer in self.buffers]

    def poison(self) -> None:
        """Writes other bytes everywhere."""
        for buffer in self.buffers:
            buffer.fill_(777.0)


def same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Returns whether all tensors have the same bytes."""
    return all(same_bytes(tensor, other) for tensor, other in zip(expected, actual, strict=True))


def raising(error: Exception) -> Any:
    """Makes a function that only raises the error."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def config(**fields: Any) -> Mapping[str, Any]:
    """Returns the settings of disaggregated serving, as SGLang's get_disagg does."""
    values = {
        "disaggregation_mode": "decode",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "disaggregation_decode_enable_radix_cache": False,
        "enable_pd_role_switch": False,
    }
    return {**values, **fields}


def keeper_over(
    allocator: Any,
    request_pool: Any,
    draft_pools: Sequence[Any] = (),
    settings: Settings = SETTINGS,
    *,
    window_tokens: int | None = None,
    **more: Any,
) -> Keeper:
    """Makes a keeper of the allocator's pool, as in a scheduler with that request pool."""
    subject = Subject.in_scheduler(allocator, request_pool, window_tokens)
    return open_keeper(subject, draft_pools, settings, **more)


def keeper_of(attachment: Attachment) -> Keeper:
    """Returns the attachment's keeper, which must exist."""
    assert attachment.keeper is not None
    return attachment.keeper


def read_ahead(keeper: Keeper, waiting: Sequence[Backup]) -> None:
    """Takes a server's steps until the first of the waiting requests is in the arena."""
    for _ in range(STEPS):
        keeper.read_ahead(waiting)
        if waiting[0].size_bytes:
            return
        time.sleep(0.001)
    raise AssertionError(f"{waiting[0]} wasn't read ahead")
