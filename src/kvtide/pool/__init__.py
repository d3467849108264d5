"""Who holds which slot, and where a slot's bytes are."""

from kvtide.pool.pool import Pool
from kvtide.pool.slots import PageAllocator

__all__ = ["PageAllocator", "Pool"]
