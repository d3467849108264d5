"""What a keeper covers, and what it lacks, in words for one line of an engine's log."""

from __future__ import annotations

from kvtide.plugin.keeper import Keeper
from kvtide.sizes import format_size


def coverage(keeper: Keeper) -> str:
    """The pool, its planes, what a token takes, and for how many tokens the arena has room."""
    names = [plane.name for plane in keeper.tide.pool.geometry.planes]
    return (
        f"covers {keeper.description.name} ({', '.join(names)}), {keeper.token_bytes} bytes a "
        f"token, arena up to {format_size(keeper.arena.limit_bytes)} on this rank, for "
        f"{keeper.arena.limit_bytes // max(1, keeper.token_bytes)} tokens"
    )


def without_room(keeper: Keeper) -> str:
    """Why no request can be saved, where the arena has no room for any; nothing otherwise."""
    arena = keeper.arena
    if arena.limit_bytes < arena.block_bytes:
        return f"that holds not even one block of {arena.block_bytes} bytes"
    return ""


def without_draft(keeper: Keeper) -> str:
    """Why the draft model's KV isn't kept; nothing where it is, or where there is none."""
    refusal = keeper.draft_refusal
    return f"the draft model's KV isn't kept: {refusal}" if refusal else ""
