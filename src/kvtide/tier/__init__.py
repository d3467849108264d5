"""Tiers: stores for snapshots below host memory, such as a disk. base.py has their contract."""

from __future__ import annotations

from kvtide.tier.base import Tier
from kvtide.tier.disk import DiskStats, DiskTier
from kvtide.tier.entry import SpillStats
from kvtide.tier.spill import Spill
from kvtide.tier.store import Store

__all__ = ["DiskStats", "DiskTier", "Spill", "SpillStats", "Store", "Tier"]
