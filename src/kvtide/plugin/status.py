"""Describes a keeper for a line of an engine's log: what it covers, and what is missing."""

from __future__ import annotations

from kvtide.plugin.keeper import Keeper
from kvtide.sizes import format_size


def coverage(keeper: Keeper) -> str:
    """The pool, its planes, the bytes of a token, and the room of arena and disk in tokens."""
    blocks_bytes = keeper.arena.block_count * keeper.arena.block_bytes
    names = [plane.name for plane in keeper.tide.pool.geometry.planes]
    return (
        f"covers {keeper.description.name} ({', '.join(names)}), {keeper.token_bytes} bytes a "
        f"token, arena up to {_room(keeper, keeper.arena.limit_bytes, blocks_bytes)}"
        f"{_below(keeper)}"
    )


def _room(keeper: Keeper, limit_bytes: int, kv_bytes: int) -> str:
    tokens = kv_bytes // max(1, keeper.token_bytes)
    return f"{format_size(limit_bytes)} on this rank, for {tokens} tokens"


def _below(keeper: Keeper) -> str:
    """What is below the arena, in the order in which it is asked."""
    store, tiers = keeper.store, []
    if store is not None and store.disk is not None:
        limit = store.disk.stats.limit_bytes
        tiers.append(f"disk up to {_room(keeper, limit, limit)}")
    if store is not None and store.mooncake is not None:
        tiers.append("a Mooncake store")
    return f", below it {', then '.join(tiers)}" if tiers else ""


def without_room(keeper: Keeper) -> str:
    """Why no request can be saved, if the arena is too small for any; otherwise empty."""
    arena = keeper.arena
    if not arena.block_count:
        return f"that holds not even one block of {arena.block_bytes} bytes"
    return ""


def without_draft(keeper: Keeper) -> str:
    """Why the draft model's KV isn't kept; empty if it is kept, or if there is no draft model."""
    refusal = keeper.draft_refusal
    return f"the draft model's KV isn't kept: {refusal}" if refusal else ""
