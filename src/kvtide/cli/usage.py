"""What is wrong with a command line, in kvtide's words and not in those of typer's parser."""

from __future__ import annotations

from typing import Any

import typer

from kvtide.errors import shortened

_WHOLE, _NUMBER = "a whole number", "a number"


def describe_usage(error: typer.TyperException) -> str:
    """The option, its value, and what it must be; typer's own words for anything else."""
    problems = getattr(error.__cause__, "errors", None)  # pydantic's errors; typer uses pydantic
    option: Any = getattr(error, "param", None)
    if not callable(problems) or option is None:
        return error.format_message()
    problem = problems()[0]
    needed = _needed(problem["type"], problem.get("ctx", {}))
    if needed is None:
        return error.format_message()
    name, value = max(option.opts, key=len), shortened(str(problem["input"]), 60)
    return f"{name} is {value!r}{_origin(error, option)}; it must be {needed}"


def _needed(kind: str, limits: dict[str, Any]) -> str | None:
    if kind.startswith("int"):
        return _WHOLE
    if kind.startswith("float"):
        return _NUMBER
    if kind == "greater_than_equal":
        return f"{limits['ge']} or more"
    if kind == "less_than_equal":
        return f"{limits['le']} or less"
    choices = str(limits.get("error", "")).partition(" is not one of ")[2]
    return f"one of {choices.rstrip('.').replace(chr(39), '')}" if choices else None


def _origin(error: Any, option: Any) -> str:
    """Names the file if the value comes from `--config`."""
    context = error.ctx
    source = None if context is None else context.get_parameter_source(option.name)
    is_default = getattr(source, "name", "") == "DEFAULT_MAP"
    return f" in {context.params.get('config')}" if is_default else ""
