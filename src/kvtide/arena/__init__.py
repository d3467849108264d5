"""Bounded host memory for bytes that were copied from a device."""

from kvtide.arena.host import Charge, HostArena, Lease
from kvtide.arena.shares import arena_for, arena_of_blocks

__all__ = ["Charge", "HostArena", "Lease", "arena_for", "arena_of_blocks"]
