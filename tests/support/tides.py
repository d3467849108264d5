"""A small tide, and helpers for it."""

from __future__ import annotations

from kvtide.arena import HostArena
from kvtide.device import Device
from kvtide.pool import PageAllocator
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from support.pools import (
    fill,
    make_pool,
    small_geometry,
)

TOKEN_BYTES = 36
BLOCK_BYTES = 4 * TOKEN_BYTES


def make_tide(device: Device, *, block_count: int = 8, page_count: int = 5) -> Tide:
    """Makes a tide of pages of 4 tokens with random bytes, and an arena of a page in each block."""
    case = make_pool("created", small_geometry(), device, page_count)
    fill(case, 1)
    arena = HostArena(device, limit_bytes=block_count * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    return Tide(case.pool, arena, PageAllocator(page_count))


def books(tide: Tide) -> tuple[int, int, int]:
    """Returns the numbers of free pages and held pages, and the leased bytes."""
    pages = tide._books
    return pages.free_count, pages.held_count, tide.arena.used_bytes


def damage(snapshot: Snapshot) -> None:
    """Flips one bit in the snapshot's last block."""
    snapshot.lease.blocks[-1].bytes_view(1)[0] ^= 1


def acquire(tide: Tide, count: int) -> list[int]:
    """Acquires pages that are known to be free."""
    pages = tide._books.acquire(count)
    assert pages is not None
    return pages
