"""An operator's settings: variables of the environment, or of a TOML file under the same names.

    KVTIDE_SGLANG            1 (default), 0: off, strict: a pool that is refused stops the server
    KVTIDE_SGLANG_COLOCATED  1: save and restore in a server that isn't a decode server, too
    KVTIDE_HOST_MEMORY       the host memory of all ranks on this host together, such as 24GiB
    KVTIDE_DISK_DIR          the folder of KV that has no room there; each rank has a folder in it
    KVTIDE_DISK_MEMORY       the disk space of all ranks on this host together, such as 200GiB
    KVTIDE_MOONCAKE          the Mooncake store of KV that has no room on the disk
    KVTIDE_TIER_SECONDS      how long a step may wait for the disk and the store
    KVTIDE_CONFIG            the path of a file with the other variables; the environment wins

An invalid value is an error that names it. Otherwise an operator would notice only under load that
a setting has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from kvtide.plugin.environment import (
    BELOW,
    HOST_MEMORY,
    Below,
    below_of,
    choice,
    host_memory_bytes,
    read_values,
    unknown_variables,
)

Mode = Literal["off", "on", "strict"]

MODE = "KVTIDE_SGLANG"
COLOCATED = "KVTIDE_SGLANG_COLOCATED"

_NAMES = (MODE, COLOCATED, HOST_MEMORY, *BELOW)
_MODES: Mapping[str, Mode] = {"0": "off", "1": "on", "strict": "strict"}
_SWITCH = {"0": False, "1": True}


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, checked."""

    mode: Mode = "on"
    """`strict`: a pool that kvtide refuses is an error at the start."""
    is_colocated: bool = False
    """Whether a server that isn't a disaggregated decode server saves and restores as well."""
    host_memory_bytes: int | None = None
    """The limit of all arenas on this host together; None means a share of the free memory."""
    below: Below = field(default_factory=Below)
    """What is below these arenas."""
    rank_count: int = 1
    """How many ranks of the server share this host's memory; SGLang tells."""
    unknown: tuple[str, ...] = ()
    """Variables that seem to be meant for kvtide, in words: see unknown_variables."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process's environment, or of `environment`.

    Raises UsageError, which names the variable or the file, for an invalid value.
    """
    values = read_values(_NAMES, environment)
    return Settings(
        choice(values, MODE, _MODES, "1"),
        choice(values, COLOCATED, _SWITCH, "0"),
        host_memory_bytes(values),
        below_of(values),
        unknown=tuple(unknown_variables(_NAMES, environment)),
    )
