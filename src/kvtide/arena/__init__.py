"""Bounded host memory for what was taken off the device."""

from kvtide.arena.host import HostArena, Lease

__all__ = ["HostArena", "Lease"]
