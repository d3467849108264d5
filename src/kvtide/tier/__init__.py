"""Tiers: stores for snapshots below host memory. Each is one file beside base.py, the contract."""

from __future__ import annotations

from kvtide.tier.base import Tier
from kvtide.tier.disk import DiskStats, DiskTier
from kvtide.tier.spill import Spill, SpillStats
from kvtide.tier.store import Store

__all__ = ["DiskStats", "DiskTier", "Spill", "SpillStats", "Store", "Tier"]
