"""Describes a keeper for a line of an engine's log: what it covers, and what is missing."""

from __future__ import annotations

from kvtide.plugin.keeper import Keeper
from kvtide.sizes import format_size


def coverage(keeper: Keeper) -> str:
    """The pool, its planes, the bytes of a token, and the room of the arena in tokens."""
    names = [plane.name for plane in keeper.tide.pool.geometry.planes]
    return (
        f"covers {keeper.description.name} ({', '.join(names)}), {keeper.token_bytes} bytes a "
        f"token, arena up to {format_size(keeper.arena.limit_bytes)} on this rank, for "
        f"{keeper.arena.limit_bytes // max(1, keeper.token_bytes)} tokens{_disk(keeper)}"
    )


def _disk(keeper: Keeper) -> str:
    if keeper.store is None or keeper.store.disk is None:
        return ""
    limit_bytes = keeper.store.disk.stats.limit_bytes
    return f", disk below it up to {format_size(limit_bytes)}"


def without_room(keeper: Keeper) -> str:
    """Why no request can be saved, if the arena is too small for any; otherwise empty."""
    arena = keeper.arena
    if arena.limit_bytes < arena.block_bytes:
        return f"that holds not even one block of {arena.block_bytes} bytes"
    return ""


def without_draft(keeper: Keeper) -> str:
    """Why the draft model's KV isn't kept; empty if it is kept, or if there is no draft model."""
    refusal = keeper.draft_refusal
    return f"the draft model's KV isn't kept: {refusal}" if refusal else ""
