"""`--config FILE`: options from a TOML file, under the names that they have on the command line.

    [run]
    model = "smollm2"
    kv-memory = "24MiB"
    stop = ["\\n\\n"]
    verify = true

What the command line says wins. The values become what the command line would hold, so that they
are parsed and refused in the same way.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtide.errors import UsageError, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LARGEST_BYTES = 1 << 20
_NOT_IN_FILES = ("config", "help", "prompt")


def read_config(path: Path, table: str) -> dict[str, Any]:
    """The table of that name. Raises UsageError if the file has anything else, or can't be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
        if len(raw) > _LARGEST_BYTES:
            raise UsageError(f"--config: {path} is larger than 1 MiB; name a file of settings")
        content = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror or error}") from error
    # ValueError: it is not UTF-8 or not TOML. RecursionError: brackets are nested too deeply.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path} is not TOML: {error}") from error
    for name in content:
        if name != table:
            raise UsageError(
                f"--config: {path} has {_quoted(name)} outside of [{table}]; "
                f"write all settings below [{table}]"
            )
    settings = content.get(table, {})
    if not isinstance(settings, dict):
        raise UsageError(f"--config: in {path}, {table} is not a table; write [{table}]")
    return settings


def defaults_of(command: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by the names of typer's parameters, each as the command line would have it.

    Raises UsageError for a name that the command doesn't have, and for a value of another kind.
    """
    options = _options_of(command)
    defaults: dict[str, Any] = {}
    for name, value in settings.items():
        key = name.replace("_", "-")
        if key not in options:
            near = difflib.get_close_matches(key, options, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(options)}"
            raise UsageError(f"--config: there is no option {_quoted(name)}{hint}")
        option, is_negative = options[key]
        if option.name in defaults:
            raise UsageError(f"--config: {_quoted(name)} was set before; keep one of them")
        defaults[option.name] = _converted(option, key, value, is_negative=is_negative)
    return defaults


def _options_of(command: Any) -> dict[str, tuple[Any, bool]]:
    """By name without dashes: the option, and whether the name switches it off (`fast`)."""
    options: dict[str, tuple[Any, bool]] = {}
    for option in command.params:
        if option.param_type_name != "option" or option.name in _NOT_IN_FILES:
            continue
        options |= {name[2:]: (option, False) for name in option.opts if name.startswith("--")}
        options |= {name[2:]: (option, True) for name in option.secondary_opts}
    return options


def _converted(option: Any, name: str, value: object, *, is_negative: bool) -> Any:
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"--config: {name} is {_quoted(value)}; write true or false")
        return value is not is_negative
    if option.multiple:
        items = value if isinstance(value, list) else [value]
        return [_text(name, item) for item in items]
    return _text(name, value)


def _text(name: str, value: object) -> str:
    # In Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"--config: {name} is {_quoted(value)}; write a number or a text")
    return str(value)


def _quoted(value: object) -> str:
    return repr(shortened(str(value), 60))
