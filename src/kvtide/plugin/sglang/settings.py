"""What an operator may set: in the environment, or in a TOML file under the same names.

    KVTIDE_SGLANG            1 (default), 0: off, strict: a pool that is refused stops the server
    KVTIDE_SGLANG_COLOCATED  1: save and restore in a server that isn't a decode server, too
    KVTIDE_HOST_MEMORY       for all ranks on this host together, such as 24GiB
    KVTIDE_CONFIG            the path of a file with the others in it; the environment wins

An invalid value is an error that names it: a server that came up without what was asked for would
be found out under load.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from kvtide.errors import UsageError, shortened
from kvtide.sizes import parse_size

Mode = Literal["off", "on", "strict"]

MODE = "KVTIDE_SGLANG"
COLOCATED = "KVTIDE_SGLANG_COLOCATED"
HOST_MEMORY = "KVTIDE_HOST_MEMORY"
CONFIG = "KVTIDE_CONFIG"

_MODES: Mapping[str, Mode] = {"0": "off", "1": "on", "strict": "strict"}
_SWITCH = {"0": False, "1": True}
_LARGEST_CONFIG_BYTES = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """What was set, checked."""

    mode: Mode = "on"
    """`strict`: a pool that kvtide refuses is an error at the start."""
    is_colocated: bool = False
    """Whether a server that isn't a disaggregated decode server saves and restores as well."""
    host_memory_bytes: int | None = None
    """The arenas of all of this host's ranks together; None for a part of what is free."""
    rank_count: int = 1
    """How many ranks of the server share this host, and so its memory. SGLang says."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process's environment, or of `environment`.

    Raises UsageError, which names the variable or the file, for an invalid value.
    """
    given = os.environ if environment is None else environment
    texts = {name: given[name].strip() for name in (MODE, COLOCATED, HOST_MEMORY) if name in given}
    path = given.get(CONFIG, "").strip()
    found = _read_config(path) if path else {}
    found.update({name: text for name, text in texts.items() if text})
    memory = found.get(HOST_MEMORY)
    return Settings(
        _MODES[_one_of(MODE, found.get(MODE, "1"), _MODES)],
        _SWITCH[_one_of(COLOCATED, found.get(COLOCATED, "0"), _SWITCH)],
        None if memory is None else parse_size(memory, name=HOST_MEMORY),
    )


def _one_of(name: str, text: str, accepted: Mapping[str, Any]) -> str:
    if text not in accepted:
        raise UsageError(f"{name}: {shortened(text)!r} is none of {', '.join(accepted)}")
    return text


def _read_config(path: str) -> dict[str, str]:
    """The file's values as the environment would have them."""
    names = (MODE, COLOCATED, HOST_MEMORY)
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
    except ValueError as error:  # not TOML, not UTF-8, or no path at all
        raise UsageError(f"{CONFIG}: {path} isn't a TOML file: {error}") from error
    return parsed


def _toml() -> Any:
    """Python's parser, which 3.10 doesn't have yet, or the package that became it."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(f"{CONFIG} needs Python 3.11, or the package tomli; or set the variables")
