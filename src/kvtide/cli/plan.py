"""`kvtide plan`: how many bytes a token of a model takes, from its configuration alone."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.cli.display import print_table
from kvtide.cli.displays import make_display
from kvtide.errors import UsageError
from kvtide.models.names import BUILT_IN, HUB_ID
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.layout import PlaneGeometry
    from kvtide.models.cache import ModelCache

_GIB = 1 << 30
_LARGEST_CONFIG_BYTES = 16 << 20
_ACCEPTED = (
    "a folder with a config.json, such a file, a .gguf file, a hub id such as org/name, smollm2 or "
    "tiny-random"
)


class CacheDType(str, Enum):
    """The dtypes of keys, values and latents."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float8_e4m3fn = "float8_e4m3fn"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json, a .gguf file, a hub id (its config alone), smollm2 or "
            "tiny-random.",
        ),
    ],
    dtype: Annotated[CacheDType, typer.Option(help="Dtype of the KV cache.")] = CacheDType.bfloat16,
    page_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens a page.")] = 16,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the heads.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Stages that share the layers.")] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Also the bytes of a request this long."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print how much memory a token of a model takes: planes, bytes, tokens per GiB."""
    config = read_config(model)
    from kvtide.models.cache import cache_of

    cache = cache_of(config, dtype=dtype.value, page_size=page_size, tensor_ranks=tp, stages=pp)
    if as_json:
        typer.echo(json.dumps(to_json(cache, model, tp=tp, pp=pp, tokens=tokens)))
        return
    console = Console()
    print_table(console, _heading(cache, model, tp=tp, pp=pp))
    _print_planes(console, cache)
    print_table(console, _costs(cache, tokens))


def read_config(name: str) -> dict[str, Any]:
    """The configuration of the model with that name. Nothing else of the model is read.

    Raises UsageError, in one line, if there is none.
    """
    if name in BUILT_IN:
        return dict(BUILT_IN[name])
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise UsageError(f"{name} is not a model's folder: it has no config.json")
        if path.is_file():
            return _read_gguf(path) if path.suffix == ".gguf" else _read_json(path)
    # RuntimeError: `~user` names an unknown user. ValueError: no file can have this name.
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name[:80]!r} can't be read ({reason}): name {_ACCEPTED}") from error
    if HUB_ID.fullmatch(name) and not name.endswith((".json", ".gguf")):
        return _read_json(_fetch_config(name))
    raise UsageError(f"there is no model {name[:80]!r}: name {_ACCEPTED}")


def _read_gguf(path: Path) -> dict[str, Any]:
    """The configuration that `kvtide run` makes from the file. Reads no weights."""
    from kvtide.serve.checkpoint import read_gguf_config

    return read_gguf_config(path)


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST_CONFIG_BYTES:
        raise UsageError(f"{path} is not a config.json: it is larger than 16 MiB")
    try:
        config = json.loads(path.read_bytes())
    # RecursionError: brackets are nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}; name {_ACCEPTED}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a model's configuration: it holds no JSON object")
    return config


def _fetch_config(name: str) -> Path:
    """The file `config.json` of a model on the hub, kept in the hub's own cache."""
    import huggingface_hub

    from kvtide.serve.hub import silent_hub

    # The import sets how much the hub prints, so it comes before `silent_hub`.
    fetch = huggingface_hub.hf_hub_download
    with make_display(Console(stderr=True)) as display, silent_hub():
        display.load(f"fetching the configuration of {name} from the hub", 0, None)
        try:
            return Path(fetch(name, "config.json"))
        # The hub raises its HTTP client's errors, and changes the client between releases.
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UsageError(
                f"the configuration of {name} can't be fetched: there is no such folder here, and "
                f"the hub fails: {reason[:300].rstrip('.')}; name {_ACCEPTED}"
            ) from error


def to_json(
    cache: ModelCache, model: str, *, tp: int, pp: int, tokens: int | None
) -> dict[str, object]:
    """The printed figures as one object. Sizes are in bytes, for one rank."""
    geometry = cache.geometry
    windowed = cache.window_tokens is not None
    axes = {plane.name: plane.axes for plane in geometry.layout.planes}
    return {
        "model": model,
        "model_type": cache.model_type,
        "layout": geometry.layout.name,
        "page_size": geometry.page_size,
        "tp": tp,
        "has_padding": cache.has_padding,
        "pp": pp,
        "layers": [cache.layers.start, cache.layers.stop],
        "layer_count": cache.layer_count,
        "planes": [
            {
                "name": plane.name,
                "axes": axes[plane.name],
                "row_shape": list(plane.row_shape),
                "dtype": plane.dtype,
                "layers": plane.layer_count,
                "row_bytes": plane.row_bytes,
                "tokens_per_row": plane.tokens_per_row,
            }
            for plane in geometry.planes
        ],
        "sizes": dict(geometry.sizes),
        "token_bytes": geometry.token_bytes,
        "window_tokens": cache.window_tokens,
        "token_bytes_beyond_window": cache.lasting.token_bytes if windowed else None,
        "page_bytes": geometry.page_bytes,
        "request_bytes": geometry.request_bytes,
        "tokens_per_gib": _tokens_per_gib(geometry.token_bytes),
        "tokens_per_gib_beyond_window": (
            _tokens_per_gib(cache.lasting.token_bytes) if windowed else None
        ),
        "tokens": tokens,
        "bytes_of_tokens": None if tokens is None else cache.bytes_of(tokens),
    }


def _tokens_per_gib(token_bytes: int) -> int | None:
    """None if a token takes no memory."""
    return _GIB // token_bytes if token_bytes else None


def _heading(cache: ModelCache, model: str, *, tp: int, pp: int) -> list[tuple[str, str]]:
    rows = [("model", f"{model} ({cache.model_type})"), ("layout", cache.geometry.layout.name)]
    if tp > 1:
        padding = ", some of them padding, as SGLang does it on a CPU" if cache.has_padding else ""
        rows.append(("rank", f"one of {tp:,} that share the heads{padding}"))
    if pp > 1:
        first, last = cache.layers.start, cache.layers.stop - 1
        share = f"layers {first} to {last} of {cache.layer_count:,}"
        rows.append(("stage", f"one of {pp:,}: {share}, the fullest as SGLang divides them"))
    return rows


def _print_planes(console: Console, cache: ModelCache) -> None:
    """Prints a table on a terminal, otherwise a line for each plane."""
    planes = [(plane, _axes(plane, cache)) for plane in cache.geometry.planes]
    if not console.is_terminal:
        for plane, axes in planes:
            layers = counted(plane.layer_count, "layer")
            line = f"plane {plane.name}: {axes}, {plane.dtype}, {layers}, "
            console.print(
                f"{line}rows of {counted(plane.row_bytes, 'byte')}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("plane", no_wrap=True)
    table.add_column("a row")
    table.add_column("dtype", no_wrap=True)
    for heading in ("layers", "row bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plane, axes in planes:
        cells = (plane.name, axes, plane.dtype, f"{plane.layer_count:,}", f"{plane.row_bytes:,}")
        table.add_row(*(Text(cell) for cell in cells))
    console.print()
    console.print(table)
    console.print()


def _axes(plane: PlaneGeometry, cache: ModelCache) -> str:
    """The axes behind the layer axis; the axes of a row with their sizes."""
    planes = cache.geometry.layout.planes
    declared = next(candidate for candidate in planes if candidate.name == plane.name)
    unit, _, row = declared.split()
    part = f"{plane.name.rpartition('.')[0]}_"
    sizes = [
        axis if axis.isdecimal() else f"{axis.removeprefix(part)}={size}"
        for axis, size in zip(row, plane.row_shape, strict=True)
    ]
    units = ["page", "token"] if unit == "token" else [unit]
    return " ".join([*units, *sizes])


def _costs(cache: ModelCache, tokens: int | None) -> list[tuple[str, str]]:
    geometry, window = cache.geometry, cache.window_tokens
    rows = [("a token", _bytes(geometry.token_bytes))]
    counts = [("tokens per GiB", _per_gib(geometry.token_bytes))]
    if window is not None:
        beyond = cache.lasting.token_bytes
        rows.append((f"a token past {window:,}", f"{_bytes(beyond)}, as one leaves the window"))
        counts.append((f"per GiB past {window:,}", _per_gib(beyond)))
    rows.append((f"a page of {counted(geometry.page_size, 'token')}", _bytes(geometry.page_bytes)))
    state_bytes = geometry.request_bytes
    state = f"{_bytes(state_bytes)} of state" if state_bytes else "nothing"
    rows += [("a request", f"{state} beside its tokens"), *counts]
    if tokens is not None:
        parts = "whole pages and state" if state_bytes else "whole pages"
        rows.append((counted(tokens, "token"), f"{_bytes(cache.bytes_of(tokens))}, {parts}"))
    return rows


def _per_gib(token_bytes: int) -> str:
    count = _tokens_per_gib(token_bytes)
    return "any number" if count is None else f"{count:,}"


def _bytes(size_bytes: int) -> str:
    exact = counted(size_bytes, "byte")
    return exact if size_bytes < 1024 else f"{exact} ({format_size(size_bytes)})"
