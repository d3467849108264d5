"""Tiers: stores for snapshots below host memory, such as a disk. base.py has their contract."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.tier.base import Tier
    from kvtide.tier.counts import SpillStats, TierCounts
    from kvtide.tier.disk import DiskStats, DiskTier
    from kvtide.tier.mooncake import MooncakeTier
    from kvtide.tier.mooncake_settings import MooncakeSettings
    from kvtide.tier.namespace import Namespace
    from kvtide.tier.spill import Spill
    from kvtide.tier.store import Store

__all__ = [
    "DiskStats",
    "DiskTier",
    "MooncakeSettings",
    "MooncakeTier",
    "Namespace",
    "Spill",
    "SpillStats",
    "Store",
    "Tier",
    "TierCounts",
]

# Who only looks into a folder, as `kvtide inspect` does, doesn't need torch.
_HOMES = {
    "DiskStats": "kvtide.tier.disk",
    "DiskTier": "kvtide.tier.disk",
    "MooncakeSettings": "kvtide.tier.mooncake_settings",
    "MooncakeTier": "kvtide.tier.mooncake",
    "Namespace": "kvtide.tier.namespace",
    "Spill": "kvtide.tier.spill",
    "SpillStats": "kvtide.tier.counts",
    "Store": "kvtide.tier.store",
    "Tier": "kvtide.tier.base",
    "TierCounts": "kvtide.tier.counts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
