"""Pools: which slot is held, and where its bytes are."""

from kvtide.pool.pool import Pool
from kvtide.pool.slots import PageAllocator

__all__ = ["PageAllocator", "Pool"]
