"""Which extra of kvtide's installs a package that is missing. Needs the standard library alone."""

from __future__ import annotations

import sys

EXTRAS = {
    "cli": ("typer", "rich", "huggingface_hub", "tomli"),
    "serve": (
        "transformers",
        "accelerate",
        "fastapi",
        "filelock",
        "gguf",
        "jinja2",
        "platformdirs",
        "prometheus_client",
        "safetensors",
        "starlette",
        "tokenizers",
        "uvicorn",
    ),
}
"""The packages that each extra of kvtide's installs, by the names of their modules."""


def describe_missing(error: ModuleNotFoundError) -> str:
    """Names the package that is missing and the remedy. Raises `error` for a module of kvtide's."""
    package = (error.name or "kvtide").partition(".")[0]
    if package == "kvtide":
        raise error
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    what = package if extra is None else f"'kvtide[{extra}]'"
    needs = ""
    if extra == "serve" and sys.version_info < (3, 11):
        needs = f" in Python 3.11 or later; this is {sys.version_info[0]}.{sys.version_info[1]}"
    return f"{package} is not installed; this command needs: pip install {what}{needs}"
