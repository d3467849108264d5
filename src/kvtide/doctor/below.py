"""Tells what an operator set below host memory: how much fits there, and whether it can be used."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvtide.doctor.finding import Finding
from kvtide.errors import UsageError
from kvtide.plugin.environment import DISK_DIR, DISK_MEMORY, MOONCAKE, TIER_SECONDS, Below
from kvtide.sizes import format_size
from kvtide.tier.mooncake_connect import check_mooncake
from kvtide.tier.mooncake_settings import MooncakeSettings
from kvtide.tier.store import default_disk_bytes

_CONSEQUENCE = "what has no room in host memory doesn't go there"


def facts_of(below: Below) -> list[tuple[str, str]]:
    """What is set, by variable, in words."""
    disk, store = below.disk_dir, below.mooncake
    facts = [(DISK_DIR, "not set: no disk below host memory" if disk is None else str(disk))]
    if disk is not None:
        facts.append((DISK_MEMORY, _room_of(disk, below.disk_bytes)))
    named = "not set: no Mooncake store" if store is None else f"the store of {store.master}"
    facts.append((MOONCAKE, named))
    if disk is not None or store is not None:
        waits = f"a step waits {below.wait_s:g} s at most for what is below host memory"
        facts.append((TIER_SECONDS, waits))
    return facts


def findings_of(below: Below) -> list[Finding]:
    """Whether what is set can be used. Changes nothing on the disk."""
    found = []
    if below.disk_dir is not None:
        found.append(("the disk below host memory", why_no_disk(below.disk_dir)))
    if below.mooncake is not None:
        found.append(("the Mooncake store below host memory", why_no_store(below.mooncake)))
    return [Finding(name, reason, _CONSEQUENCE if reason else "") for name, reason in found]


def to_json(below: Below) -> dict[str, object]:
    """What is set, as one object."""
    return {
        "disk_dir": None if below.disk_dir is None else str(below.disk_dir),
        "disk_memory_bytes": below.disk_bytes,
        "mooncake": None if below.mooncake is None else below.mooncake.master,
        "tier_seconds": below.wait_s,
    }


def _room_of(folder: Path, limit_bytes: int | None) -> str:
    free_bytes = 0
    with suppress(OSError):
        free_bytes = shutil.disk_usage(_existing(folder)).free
    free = f"{format_size(free_bytes)} free there now"
    if limit_bytes is None:
        quarter = format_size(default_disk_bytes(folder))
        used = "or used by kvtide"
        return f"not set: a quarter of the {free} {used}, {quarter} for all ranks on this host"
    return f"{format_size(limit_bytes)} for all ranks on this host, with {free}"


def _existing(folder: Path) -> Path:
    """The folder, or the one in which a server will make it."""
    return folder if folder.exists() else folder.parent


def why_no_disk(folder: Path) -> str | None:
    """Why a server can't use the folder; None if it can. Changes nothing on the disk."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} isn't a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} can't be written by this user"
    return None


def why_no_store(settings: MooncakeSettings) -> str | None:
    """Why a server can't join a Mooncake store; None if it can."""
    try:
        check_mooncake(settings)
    except UsageError as error:
        return str(error)
    return None
