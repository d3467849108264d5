"""Bounded host memory for bytes that were copied from a device."""

from kvtide.arena.host import HostArena, Lease

__all__ = ["HostArena", "Lease"]
