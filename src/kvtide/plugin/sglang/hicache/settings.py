"""An operator's settings: SGLang's JSON of --hicache-storage-backend-extra-config.

    disk_dir       a folder for pages; each rank has a folder in it
    disk_memory    the disk space of all ranks on this host together, such as 50GiB
    mooncake       the master of a Mooncake store as HOST:PORT, or a file of Mooncake's settings
    weights        a name for the model's weights, in place of a digest of its files
    deadline_s     seconds that a call of SGLang's waits at most; 5 by default

An invalid value is an error that names it, and ends the start.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kvtide.errors import UsageError, shortened
from kvtide.sizes import parse_memory
from kvtide.tier.mooncake_settings import MooncakeSettings

OPTION = "--hicache-storage-backend-extra-config"
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_OURS = ("disk_dir", "disk_memory", "mooncake", "weights", "deadline_s")
_DEADLINE_S = 5.0
_LONGEST_DEADLINE_S = 8.0
"""SGLang waits 10 seconds for its threads when the cache is flushed, and ends the server then."""


@final
@dataclass(frozen=True, slots=True)
class StorageSettings:
    """The settings, checked."""

    disk_dir: Path | None = None
    disk_bytes: int | None = None
    """The limit of all ranks' files together; None means a quarter of what is free, or ours."""
    mooncake: MooncakeSettings | None = None
    weights: str = ""
    """The operator's name for the weights; empty means a digest of their files."""
    deadline_s: float = _DEADLINE_S
    is_flat: bool = False
    """Whether SGLang passes the pages of the pool `kv` as flat tensors."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> StorageSettings:
        """Reads the JSON's values. Raises UsageError, which names the one that is invalid."""
        values = dict(given or {})
        for name in values:
            if name not in (*_OF_SGLANG, *_OURS):
                close = difflib.get_close_matches(name, _OURS, n=1)
                raise UsageError(
                    f"{OPTION}: kvtide knows no {shortened(name)!r}"
                    + "".join(f" (did you mean {match!r}?)" for match in close)
                    + f"; accepted: {', '.join(_OURS)}"
                )
        folder, mooncake = _text(values, "disk_dir"), _text(values, "mooncake")
        if not folder and not mooncake:
            raise UsageError(
                f"{OPTION}: kvtide needs a place for pages: 'disk_dir', 'mooncake', or both"
            )
        return cls(
            Path(folder) if folder else None,
            _disk_bytes(values, folder),
            MooncakeSettings.parse(mooncake, name=f"{OPTION}: mooncake") if mooncake else None,
            _text(values, "weights"),
            _deadline_s(values.get("deadline_s", _DEADLINE_S)),
            is_flat=not values.get("interface_v1"),
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{OPTION}: {name} is a {type(value).__name__}, not a text")
    return value.strip()


def _disk_bytes(values: Mapping[str, Any], folder: str) -> int | None:
    value = values.get("disk_memory")
    if value is None:
        return None
    if not folder:
        raise UsageError(f"{OPTION}: disk_memory is the limit of a folder; name it with disk_dir")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{OPTION}: disk_memory is a {type(value).__name__}, not a size")
    size_bytes = parse_memory(str(value), name=f"{OPTION}: disk_memory")
    if not size_bytes:
        raise UsageError(f"{OPTION}: disk_memory: {value!r} is no room for any page")
    return size_bytes


def _deadline_s(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LONGEST_DEADLINE_S:
        raise UsageError(
            f"{OPTION}: deadline_s is {value!r}, not a number of seconds up to "
            f"{_LONGEST_DEADLINE_S:g}: SGLang ends the server when a call takes 10"
        )
    return float(value)
