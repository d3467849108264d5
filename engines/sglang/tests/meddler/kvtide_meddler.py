"""A plugin of SGLang that makes things go wrong in a decode server, by a request's id:

  full-…    finds the arena full when it is retracted
  damage-…  comes back to a backup of which a bit has changed
  full1-…, damage1-…   the same on the first of several ranks only
  skip-…    comes back, and nothing is restored: a control
  ahead-…   is saved although its last step's result is pending: another control
  abort-…   is aborted while it is retracted
  stay-…    is retracted and never comes back
  lone-…    finds no slot left in the pool for its next token
  crowd-…   is retracted only if the pool is full, whatever SGLANG_TEST_RETRACT says
  crowd-diskfull1-…, crowd-filelost1-…   finds the first rank's disk full; its file vanishes there
  crowd-hang1-…   finds that the first rank's disk hangs; after that no call of the disk ends

It hooks SGLang's retracting and resuming, outside of kvtide, and compares a request's bytes there:
it reads them from the pool's own tensors, and overwrites them when the request gives up its slots.
There is no prefill server, so a prompt's KV and state are made from the request's id: a repeated
request gets the same answer. KVTIDE_WATCH names the file that it writes, one JSON object a line.
KVTIDE_MEDDLE=refuse makes kvtide refuse every pool. KVTIDE_MEDDLE="no disk" leaves the first of
several ranks alone with a disk.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

POISON = 777.0

_KEPT: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
_RANK = {"is_first": False}


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    managers = "sglang.srt.managers"
    scheduler = f"{managers}.scheduler.Scheduler"
    decode = "sglang.srt.disaggregation.decode"
    queue = f"{decode}.DecodePreallocQueue"
    sent = f"{decode}.DecodeTransferQueue._commit_transfer_to_req"
    HookRegistry.register(f"{scheduler}.__init__", _begin, HookType.AFTER)
    HookRegistry.register(f"{managers}.schedule_batch.release_req", _release, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.update_running_batch", _update, HookType.AROUND)
    plan = f"{scheduler}.get_next_disagg_decode_batch_to_run"
    HookRegistry.register(plan, _plan, HookType.AROUND)
    HookRegistry.register(f"{queue}.resume_retracted_reqs", _resume, HookType.AROUND)
    HookRegistry.register(sent, _send, HookType.AFTER)
    unseen = "kvtide.plugin.sglang.unseen_results.UnseenResults._unseen"
    HookRegistry.register(unseen, _unseen, HookType.AFTER)
    HookRegistry.register("kvtide.tier.disk.DiskTier.put", _put, HookType.AROUND)
    if os.environ.get("KVTIDE_MEDDLE") == "no disk":
        HookRegistry.register("kvtide.plugin.below._with_disk", _find_disk, HookType.BEFORE)
    if os.environ.get("KVTIDE_MEDDLE") == "refuse":
        from kvtide.plugin.sglang.pools import describe

        describe.DESCRIBERS = {}


def _begin(_: None, scheduler: Any, *__: Any) -> None:
    """Fills the pool with random numbers, so that no row equals another or is zero."""
    from sglang.srt.runtime_context import get_parallel

    _RANK["is_first"] = get_parallel().tp_rank == 0
    for buffer in _buffers(scheduler.token_to_kv_pool_allocator):
        buffer.normal_()


def _send(_: None, queue: Any, transfer: Any) -> None:
    """Writes the KV that a prefill server would have written into the request's slots."""
    req, scheduler = transfer.req, queue.scheduler
    random = torch.Generator().manual_seed(zlib.crc32(req.rid.encode()))
    allocator, request_pool = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    slots, rows = _rows_of(req, request_pool, allocator)
    for buffer, row in zip(_buffers(allocator), rows, strict=True):
        buffer[slots] = row.normal_(generator=random)
    states = getattr(request_pool, "mamba_pool", None)
    for state in states.mamba_cache.conv if states is not None else ():
        row = req.kv.mamba_pool_idx.reshape(1).long()
        state[:, row] = state[:, row].normal_(generator=random)


def _unseen(found: list[Any], _: Any) -> list[Any]:
    """Hides pending results of requests that are to be saved without them."""
    return [
        (batch, result)
        for batch, result in found
        if not any(req.rid.startswith("ahead") for req in batch.reqs)
    ]


def _plan(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    reqs = [*running_batch.reqs, *scheduler.waiting_queue]
    if not any(req.rid.startswith("crowd") for req in reqs):
        return original(scheduler, running_batch)
    with mock.patch("sglang.srt.managers.scheduler.TEST_RETRACT", False):
        return original(scheduler, running_batch)


def _update(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    if not any(req.rid.startswith("lone") and len(req.output_ids) > 3 for req in batch.reqs):
        return original(scheduler, batch)
    allocator = scheduler.token_to_kv_pool_allocator
    taken = allocator.alloc(allocator.available_size())
    _write(event="taken", slots=len(taken))
    try:
        return original(scheduler, batch)
    finally:
        allocator.free(taken)


def _release(
    original: Callable[..., bool], *, req: Any, token_to_kv_pool_allocator: Any, **more: Any
) -> bool:
    allocator = token_to_kv_pool_allocator
    slots, rows = _rows_of(req, more["req_to_token_pool"], allocator)
    with _full_arena(_is_meant("full", req)):
        saved = original(req=req, token_to_kv_pool_allocator=allocator, **more)
    if more.get("offload_kv", True):
        _KEPT[req.rid] = slots, rows
        for buffer in _buffers(allocator):
            buffer[slots] = POISON
        _write(event="retract", rid=req.rid, saved=saved, seqlen=req.seqlen)
    return saved


def _resume(original: Callable[..., list[Any]], queue: Any, *arguments: Any) -> list[Any]:
    from sglang.srt.managers.io_struct import AbortReq

    for req in list(queue.retracted_queue):
        if req.rid.startswith("abort"):
            queue.scheduler.abort_request(AbortReq(rid=req.rid))
            _write(event="abort", rid=req.rid)
        if _is_meant("damage", req):
            block = req.kv.retraction_backup.snapshot.lease.blocks[0]
            block.bytes_view(1)[0] ^= 1
    waiting = [req for req in queue.retracted_queue if not req.rid.startswith("stay")]
    staying = [req for req in queue.retracted_queue if req.rid.startswith("stay")]
    queue.retracted_queue = waiting
    with _nothing_restored(any(req.rid.startswith("skip") for req in waiting)):
        resumed = original(queue, *arguments)
    queue.retracted_queue = [*queue.retracted_queue, *staying]
    for req in resumed:
        slots, expected = _KEPT.pop(req.rid)
        new_slots, actual = _rows_of(req, queue.req_to_token_pool, queue.token_to_kv_pool_allocator)
        same = all(
            torch.equal(tensor, other) for tensor, other in zip(expected, actual, strict=True)
        )
        moved = not torch.equal(slots, new_slots)
        _write(event="resume", rid=req.rid, exact=same, moved=moved, tokens=len(slots))
    return resumed


def _find_disk(*_: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank:
        raise OSError("no such device")


def _put(original: Callable[..., None], tier: Any, key: str, seal: Any, chunks: Any) -> None:
    """Writes a request to the disk, in a thread of kvtide's."""
    from kvtide.errors import TierFull

    if _RANK["is_first"] and seal.key.startswith("crowd-diskfull1"):
        raise TierFull("no space left")
    if _RANK["is_first"] and seal.key.startswith("crowd-hang1"):
        threading.Event().wait()
    original(tier, key, seal, chunks)
    if _RANK["is_first"] and seal.key.startswith("crowd-filelost1"):
        tier.remove(key)


def _is_meant(prefix: str, req: Any) -> bool:
    from sglang.srt.runtime_context import get_parallel

    if req.rid.startswith(f"{prefix}1"):
        return bool(get_parallel().tp_rank == 0)
    return bool(req.rid.startswith(prefix))


@contextmanager
def _full_arena(is_full: bool) -> Iterator[None]:
    from kvtide.plugin.sglang.attachment import attached

    if not is_full:
        yield
        return
    attachment = attached()
    assert attachment is not None, "the scheduler has its pools"
    assert attachment.keeper is not None, "kvtide covers them"
    arena = attachment.keeper.arena
    lease = arena.lease(arena.free_count)
    try:
        yield
    finally:
        lease.release()


@contextmanager
def _nothing_restored(is_skipped: bool) -> Iterator[None]:
    from kvtide.plugin.keeper import Keeper

    if not is_skipped:
        yield
        return
    with mock.patch.object(Keeper, "restore", lambda keeper, req, backup: keeper.discard(backup)):
        yield


def _buffers(allocator: Any) -> list[torch.Tensor]:
    pool = allocator.get_kvcache()
    pool = getattr(pool, "full_kv_pool", pool)  # the other part holds recurrent state
    return [*pool.k_buffer, *pool.v_buffer]


def _rows_of(
    req: Any, request_pool: Any, allocator: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    slots = request_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1].long().clone()
    return slots, [buffer[slots].clone() for buffer in _buffers(allocator)]


def _write(**event: Any) -> None:
    with Path(os.environ["KVTIDE_WATCH"]).open("a") as file:
        file.write(json.dumps(event) + "\n")
