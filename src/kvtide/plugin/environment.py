"""An operator's settings: variables of the environment, or of a TOML file under the same names.

    KVTIDE_HOST_MEMORY       the host memory of all ranks on this host together, such as 24GiB
    KVTIDE_DISK_DIR          the folder of KV that has no room there; each rank has a folder in it
    KVTIDE_DISK_MEMORY       the disk space of all ranks on this host together, such as 200GiB
    KVTIDE_MOONCAKE          the Mooncake store of KV that has no room on the disk: its master as
                             host:port, or a file of Mooncake's settings
    KVTIDE_TIER_SECONDS      how long a step may wait for both, for one request, such as 5
    KVTIDE_CONFIG            the path of a file with other variables; the environment wins

An engine's plugin adds variables. An invalid value is an error that names it. Otherwise an operator
would notice only under load that a setting has no effect. An unknown variable may be another
package's, so it is no error: the plugin and the doctor name it.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from kvtide.errors import UsageError, shortened
from kvtide.sizes import parse_memory
from kvtide.tier.mooncake_settings import MooncakeSettings
from kvtide.tier.namespace import SALT

HOST_MEMORY = "KVTIDE_HOST_MEMORY"
DISK_DIR = "KVTIDE_DISK_DIR"
DISK_MEMORY = "KVTIDE_DISK_MEMORY"
MOONCAKE = "KVTIDE_MOONCAKE"
TIER_SECONDS = "KVTIDE_TIER_SECONDS"
CONFIG = "KVTIDE_CONFIG"
BELOW = (DISK_DIR, DISK_MEMORY, MOONCAKE, TIER_SECONDS)
"""What is below host memory."""
OF_KVTIDE = (HOST_MEMORY, *BELOW, CONFIG, "KVTIDE_CACHE", "KVTIDE_API_KEY", SALT)
"""The variables that no engine's plugin adds. `kvtide run` keeps models in KVTIDE_CACHE."""

WAIT_S = 5.0
"""Meanwhile a disk of a gigabyte a second moves a long request, and who asks after the server's
health still gets an answer in time."""
_PREFIX = "KVTIDE_"
_LARGEST_CONFIG_BYTES = 1 << 16
_MOST_SECONDS = 3600
_LIKENESS = 0.7
"""The least ratio of difflib at which two names are taken for the same, apart from the prefix."""

Value = TypeVar("Value")


@final
@dataclass(frozen=True, slots=True)
class Below:
    """What is below the arenas of all ranks on a host together."""

    disk_dir: Path | None = None
    """The folder for what has no room in host memory; None means no disk."""
    disk_bytes: int | None = None
    """The limit of all ranks' files together; None means a quarter of what is free, or ours."""
    mooncake: MooncakeSettings | None = None
    """The Mooncake store for what the disk doesn't take; None means no store."""
    wait_s: float = WAIT_S
    """How many seconds a step may wait for tiers, for one request."""


def read_values(
    names: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The values of the variables that are set, in this process's environment or `environment`.

    Raises UsageError, which names the file, if the file can't be read or has an unknown name.
    """
    given = os.environ if environment is None else environment
    path = given.get(CONFIG, "").strip()
    values = _read_config(path, names) if path else {}
    texts = {name: given[name].strip() for name in names if name in given}
    return {**values, **{name: text for name, text in texts.items() if text}}


def unknown_variables(
    names: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """The variables that begin like kvtide's and are neither kvtide's nor among `names`.

    Each is followed by the name that it resembles, if any: `KVTIDE_X (did you mean KVTIDE_Y?)`.
    """
    given = os.environ if environment is None else environment
    known = {name.removeprefix(_PREFIX): name for name in (*OF_KVTIDE, *names)}
    found = []
    for name in given:
        if not name.upper().startswith(_PREFIX) or name in known.values():
            continue
        rest = name.upper().removeprefix(_PREFIX)
        close = difflib.get_close_matches(rest, known, n=1, cutoff=_LIKENESS)
        said = shortened(name if name.isprintable() else repr(name))
        found.append(said + "".join(f" (did you mean {known[match]}?)" for match in close))
    return found


def choice(
    values: Mapping[str, str], name: str, accepted: Mapping[str, Value], default: str
) -> Value:
    """The value for a variable's text. Raises UsageError for a text that isn't accepted."""
    text = values.get(name, default)
    if text not in accepted:
        raise UsageError(f"{name}: {shortened(text)!r} is none of {', '.join(accepted)}")
    return accepted[text]


def host_memory_bytes(values: Mapping[str, str]) -> int | None:
    """The limit of all arenas of this host's ranks together, or None. Raises UsageError."""
    text = values.get(HOST_MEMORY)
    if text is None:
        return None
    size_bytes = parse_memory(text, name=HOST_MEMORY)
    if not size_bytes:
        raise UsageError(f"{HOST_MEMORY}: {shortened(text)!r} is no room for any request")
    return size_bytes


def below_of(values: Mapping[str, str]) -> Below:
    """What is below the arenas. Raises UsageError, which names the variable."""
    folder, limit = values.get(DISK_DIR), values.get(DISK_MEMORY)
    store, seconds = values.get(MOONCAKE), values.get(TIER_SECONDS)
    if limit is not None and folder is None:
        raise UsageError(f"{DISK_MEMORY} is the limit of a folder; name it with {DISK_DIR}")
    return Below(
        None if folder is None else Path(folder),
        None if limit is None else parse_memory(limit, name=DISK_MEMORY),
        None if store is None else MooncakeSettings.parse(store, name=MOONCAKE),
        WAIT_S if seconds is None else _seconds(seconds),
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(
            f"{TIER_SECONDS}: {shortened(text)!r} isn't a number of seconds above 0 and up to "
            f"{_MOST_SECONDS}, such as {WAIT_S:g}"
        )
    return seconds


def _read_config(path: str, names: Sequence[str]) -> dict[str, str]:
    """The file's values, in the form that the environment would have."""
    values: dict[str, str] = {}
    for name, value in _parse(path).items():
        if name not in names:
            raise UsageError(
                f"{CONFIG}: {path}: {shortened(name)!r} isn't known; accepted: {', '.join(names)}"
            )
        if not isinstance(value, str | int):
            raise UsageError(f"{CONFIG}: {path}: {name} is a {type(value).__name__}, not a string")
        values[name] = str(int(value)) if isinstance(value, int) else value.strip()
    return values


def _parse(path: str) -> dict[str, Any]:
    toml = _toml()
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST_CONFIG_BYTES + 1)
        if len(content) > _LARGEST_CONFIG_BYTES:
            raise UsageError(f"{CONFIG}: {path} has more than {_LARGEST_CONFIG_BYTES} bytes")
        parsed: dict[str, Any] = toml.loads(content.decode())
    except OSError as error:
        raise UsageError(f"{CONFIG}: {path} can't be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, not UTF-8, or an invalid path
        raise UsageError(f"{CONFIG}: {path} isn't a TOML file: {error}") from error
    return parsed


def _toml() -> Any:
    """Python's TOML parser, or for Python 3.10 the package tomli."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(f"{CONFIG} needs Python 3.11, or the package tomli; or set the variables")
