"""A plugin of SGLang beside kvtide's, which records what happens to requests' KV in an engine.

It compares bytes independently, by the pool's own tensors. It overwrites slots that a request gave
up, and the slots that it gets before a restore, so that nothing is right by chance. KVTIDE_WATCH
names the file, with one JSON object a line. KVTIDE_WATCH_SKIP=1 skips restores, as a control. In an
ordinary server a request whose id begins with `abort` is aborted while its KV is in the arena, and
one whose id begins with `spoil` has a bit of its KV changed there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

POISON = 777.0

_KEPT: dict[str, tuple[torch.Tensor, list[Rows]]] = {}
"""For each saved request, by its id: its slots, and its rows of every buffer."""

_LAST: dict[str, Any] = {}


@dataclass
class Rows:
    """A request's rows of a buffer and their bytes; rows of 0 have left a window."""

    buffer: torch.Tensor
    ids: torch.Tensor
    is_of_tokens: bool

    def __post_init__(self) -> None:
        self.content = self.buffer[self.ids].clone()

    def are_kept_by(self, other: Rows) -> bool:
        """Returns whether another place of the request has the same bytes in all of its rows."""
        there = other.ids > 0
        had = self.ids[there] > 0
        return bool(had.all()) and torch.equal(self.content[there], other.content[there])

    def poison(self, first_token: int = 0) -> None:
        """Overwrites the rows from a token on, and a state as a whole."""
        ids = self.ids[first_token:] if self.is_of_tokens else self.ids
        self.buffer[ids[ids > 0]] = POISON


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    keeper = "kvtide.plugin.keeper.Keeper"
    HookRegistry.register(f"{keeper}.save", _save, HookType.AROUND)
    HookRegistry.register(f"{keeper}.restore", _restore, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.update_running_batch", _abort, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.run_batch", _run, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.on_idle", _idle, HookType.BEFORE)


def _save(original: Callable[..., Any], keeper: Any, req: Any) -> Any:
    slots, rows = _rows_of(keeper, req)
    try:
        backup = original(keeper, req)
    except Exception as error:
        _write(event="refused", rid=req.rid, why=type(error).__name__)
        raise
    _KEPT[req.rid] = slots, rows
    for held in rows:
        held.poison(req.kv.cache_protected_len)
    _write(event="save", rid=req.rid, tokens=len(slots))
    return backup


def _restore(original: Callable[..., Any], keeper: Any, req: Any, backup: Any) -> None:
    slots, rows = _rows_of(keeper, req)
    for held in rows:
        held.poison()
    old_slots, expected = _KEPT.pop(req.rid)
    if req.rid.startswith("spoil"):
        backup.snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
    if os.environ.get("KVTIDE_WATCH_SKIP"):
        keeper.discard(backup)
    else:
        try:
            original(keeper, req, backup)
        except Exception as error:
            _write(event="failed", rid=req.rid, why=type(error).__name__)
            raise
    _, actual = _rows_of(keeper, req)
    _write(
        event="restore",
        rid=req.rid,
        exact=all(
            before.are_kept_by(other) for before, other in zip(expected, actual, strict=True)
        ),
        moved=not torch.equal(old_slots, slots),
        empty=not any(bool(before.content.any()) for before in expected),
    )


def _abort(_: Any, scheduler: Any, *__: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    for req in list(scheduler.waiting_queue):
        if req.rid in _KEPT and req.rid.startswith("abort"):
            before = _arena_bytes()
            scheduler.abort_request(AbortReq(rid=req.rid))
            _write(event="abort", rid=req.rid, before=before, after=_arena_bytes())
            del _KEPT[req.rid]


def _run(scheduler: Any, batch: Any, *_: Any) -> None:
    if batch.forward_mode.is_extend():
        _write(event="extend", rids=[req.rid for req in batch.reqs])


def _idle(scheduler: Any) -> None:
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    tree, windows = scheduler.tree_cache, scheduler.is_hybrid_swa
    free = allocator.full_available_size() if windows else allocator.available_size()
    states = getattr(rows, "mamba_allocator", None)
    state = {
        "slots_free": free
        + (tree.full_evictable_size() if windows or states else tree.evictable_size()),
        "slots": scheduler.max_total_num_tokens,
        "rows_free": rows.available_size(),
        "rows": rows.size,
        "arena_bytes": _arena_bytes(),
        "window_slots_free": allocator.swa_available_size() + tree.swa_evictable_size()
        if windows
        else 0,
        "window_slots": allocator.size_swa if windows else 0,
        "states_free": states.available_size() + tree.mamba_evictable_size() if states else 0,
        "states": states.size if states else 0,
    }
    if scheduler.is_fully_idle() and state != _LAST.get("idle"):
        _LAST["idle"] = state
        _write(event="idle", **state)


def _arena_bytes() -> int | None:
    """Returns the bytes that kvtide's arenas hold in this process; None if there is no arena."""
    import gc

    from kvtide.arena import HostArena

    arenas = [found for found in gc.get_objects() if type(found) is HostArena]
    return sum(arena.used_bytes for arena in arenas) if arenas else None


def _rows_of(keeper: Any, req: Any) -> tuple[torch.Tensor, list[Rows]]:
    table, pool = keeper._requests._request_pool.req_to_token, keeper.tide.pool
    slots = table[req.kv.req_pool_idx, : req.seqlen - 1].long().clone()
    rows = []
    for plane in pool.geometry.planes:
        ids, is_of_tokens = slots, True
        if plane.name.startswith("swa."):
            ids = keeper.description.maps["swa"][slots]
        elif plane.name.startswith("conv"):
            ids, is_of_tokens = req.kv.mamba_pool_idx.reshape(1).long().clone(), False
        for layer in range(plane.layer_count):
            rows.append(Rows(pool.plane(plane.name, layer), ids, is_of_tokens))
    return slots, rows


def _write(**event: Any) -> None:
    with Path(os.environ["KVTIDE_WATCH"]).open("a") as file:
        file.write(json.dumps(event) + "\n")
