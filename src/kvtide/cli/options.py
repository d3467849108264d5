"""The options of `kvtide run` and `kvtide serve`: a dataclass for each panel of its help.

A field is an option, and its default is the option's. `flattened` makes of a function that takes
such dataclasses one that typer can read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvtide.cli.config import defaults_of, read_config
from kvtide.models.names import BUILT_IN
from kvtide.prompts import LARGEST_NEW_TOKENS, MOST_LOGPROBS, MOST_SAMPLES


class OnPressure(str, Enum):
    """What happens to the KV of a request that is retracted."""

    offload = "offload"
    recompute = "recompute"


class DType(str, Enum):
    """The dtypes of weights and KV."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class InputFormat(str, Enum):
    """How the file of prompts is written."""

    auto = "auto"
    jsonl = "jsonl"
    openai = "openai"
    text = "text"


class LogFormat(str, Enum):
    """How standard error is written."""

    text = "text"
    json = "json"


def _complete_model(incomplete: str) -> list[str]:
    """The names of models that start so; where there is none, a shell completes names of files."""
    return [name for name in BUILT_IN if name.startswith(incomplete)]


class _Panel:
    """Makes the options of one panel of the help."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __call__(self, text: str, *names: str, **settings: Any) -> Any:
        return typer.Option(*names, help=text, rich_help_panel=self._title, **settings)

    def flag(self, text: str, *names: str) -> Any:
        """An option without a value, of which typer says otherwise that it takes a bool."""
        return self(text, *names, metavar="")


_input, _model, _memory = _Panel("Input"), _Panel("Model"), _Panel("Memory")
_sampling, _output, _run = _Panel("Sampling"), _Panel("Output"), _Panel("Run")
_server = _Panel("Server")


def _use_config(ctx: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        settings = read_config(path, str(ctx.info_name))
        ctx.default_map = defaults_of(ctx.command, settings)
    return path


def _use_log_format(ctx: typer.Context, value: LogFormat) -> LogFormat:
    ctx.obj.as_json = value == LogFormat.json
    return value


@dataclass(frozen=True)
class InputOptions:
    """What is answered."""

    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS", help="A file of prompts, or - for stdin.", show_default=False
        ),
    ] = None
    prompt: Annotated[
        str | None, _input("Answer this prompt instead of a file.", "-p", "--prompt")
    ] = None
    input_format: Annotated[
        InputFormat,
        _input("How the file is written: auto, jsonl, openai or text.", metavar="FORMAT"),
    ] = InputFormat.auto
    special_tokens: Annotated[
        bool, _input.flag("Read <|im_end|> and the like in prompts as tokens.", "--special-tokens")
    ] = False


@dataclass(frozen=True)
class ModelOptions:
    """What computes the answers, and where."""

    model: Annotated[
        str,
        _model(
            "A folder, a GGUF file, a hub id, smollm2 or tiny-random.",
            autocompletion=_complete_model,
        ),
    ] = "smollm2"
    dtype: Annotated[DType, _model("Dtype of weights and KV.")] = DType.bfloat16
    device: Annotated[str, _model("Where the model and the pool are.")] = "cpu"
    simulate: Annotated[bool, _model.flag("Simulate that device.", "--simulate")] = False
    schedule: Annotated[
        str | None,
        _model("When it works: lazy, eager, random:SEED, thread.", show_default="lazy"),
    ] = None
    threads: Annotated[
        int | None, _model("Compute threads.", min=1, max=1024, show_default="torch's")
    ] = None
    exact: Annotated[
        bool, _model.flag("Answers independent of the batch, or speed.", "--exact/--fast")
    ] = True


@dataclass(frozen=True)
class MemoryOptions:
    """How much memory the KV takes, and how it is used."""

    kv_memory: Annotated[
        str | None, _memory("KV pool, such as 24MiB.", show_default="room for what runs at once")
    ] = None
    host_memory: Annotated[
        str | None, _memory("For retracted KV.", show_default="a quarter of what is free")
    ] = None
    disk_dir: Annotated[
        Path | None,
        _memory("A folder for retracted KV that host memory has no room for.", show_default="none"),
    ] = None
    disk_memory: Annotated[
        str | None, _memory("The most it takes there.", show_default="a quarter of what is free")
    ] = None
    mooncake: Annotated[
        str | None,
        _memory(
            "A Mooncake store for the rest: HOST:PORT of its master, or its .json file.",
            metavar="STORE",
            show_default="none",
        ),
    ] = None
    on_pressure: Annotated[OnPressure, _memory("Fate of retracted KV.")] = OnPressure.offload
    max_running: Annotated[int, _memory("Requests that run at once.", min=1, max=100_000)] = 64
    page_size: Annotated[int, _memory("Tokens a page.", min=1, max=4096)] = 16
    chunk_tokens: Annotated[int, _memory("Prompt tokens a step and request.", min=1)] = 256


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens are chosen. A prompt's line may say otherwise for itself."""

    max_new_tokens: Annotated[
        int, _sampling("Longest answer, in tokens.", min=1, max=LARGEST_NEW_TOKENS)
    ] = 64
    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("0 is every token.", min=0)] = 0
    top_p: Annotated[float, _sampling("Above 0, at most 1.")] = 1.0
    seed: Annotated[int, _sampling("Seeds the sampling of all requests.", min=0)] = 0
    stop: Annotated[
        list[str] | None, _sampling("End an answer before this text. May be repeated.")
    ] = None
    n: Annotated[int, _sampling("Answers to each prompt.", min=1, max=MOST_SAMPLES)] = 1


@dataclass(frozen=True)
class OutputOptions:
    """What is written where."""

    out: Annotated[
        Path | None, _output("Write answers here, one JSON line each.", show_default="stdout")
    ] = None
    resume: Annotated[bool, _output.flag("Keep the answers that --out has.", "--resume")] = False
    overwrite: Annotated[
        bool, _output.flag("Replace the answers that --out has.", "--overwrite")
    ] = False
    logprobs: Annotated[
        int | None,
        _output(
            "Log-probabilities: of each token, and of the N likeliest.",
            min=0,
            max=MOST_LOGPROBS,
            metavar="N",
        ),
    ] = None
    verify: Annotated[bool, _output.flag("Compare with a run without retractions.", "--verify")] = (
        False
    )
    report: Annotated[Path | None, _output("Write one JSON object of counts here.")] = None
    html: Annotated[Path | None, _output("Write a page here that shows what happened when.")] = None


@dataclass(frozen=True)
class LogOptions:
    """What is shown meanwhile, and where the options come from."""

    quiet: Annotated[bool, _run.flag("Show warnings and errors alone.", "--quiet", "-q")] = False
    log_format: Annotated[
        LogFormat,
        _run("Of stderr: text, or JSON objects.", is_eager=True, callback=_use_log_format),
    ] = LogFormat.text
    config: Annotated[
        Path | None,
        _run(
            "Take options from this TOML file, from the table with the command's name.",
            is_eager=True,
            callback=_use_config,
        ),
    ] = None


@dataclass(frozen=True)
class ServedModelOptions(ModelOptions):
    """The model of a server, which is what it is called with."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a GGUF file, a hub id, smollm2 or tiny-random.",
            autocompletion=_complete_model,
        ),
    ] = "smollm2"


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, to whom, and how much it bears."""

    host: Annotated[str, _server("Where it listens. Others than this machine need an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _server("0 is any free one.", min=0, max=65535)] = 8000
    api_key_file: Annotated[
        Path | None,
        _server("API keys, one a line; KVTIDE_API_KEY is one, too.", show_default="none"),
    ] = None
    name: Annotated[
        str | None, _server("The model's name for clients.", show_default="as MODEL ends")
    ] = None
    max_waiting: Annotated[
        int, _server("Answers that may wait beside those that run.", min=0, max=1_000_000)
    ] = 256
    max_per_key: Annotated[
        int | None,
        _server(
            "Answers that an API key may have at once, waiting ones included.",
            min=1,
            show_default="half of all, if there are several keys",
        ),
    ] = None
    max_body: Annotated[str, _server("The most that a request may send.")] = "4MiB"
    drain_seconds: Annotated[
        float | None,
        _server(
            "How long requests have to end after a signal.",
            min=0,
            show_default="30; 0 if a tier can keep them",
        ),
    ] = None
    special_tokens: Annotated[
        bool, _server.flag("Read <|im_end|> and the like in prompts as tokens.", "--special-tokens")
    ] = False


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a parameter for each field of the dataclasses that it takes."""
    groups = {
        name: kind
        for name, kind in get_type_hints(command).items()
        if isinstance(kind, type) and is_dataclass(kind)
    }

    @functools.wraps(command)
    def flat(ctx: typer.Context, **values: Any) -> None:
        made = {
            name: kind(**{field.name: values[field.name] for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(ctx, **made)

    parameters = [Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for kind in groups.values():
        hints = get_type_hints(kind, include_extras=True)
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat
