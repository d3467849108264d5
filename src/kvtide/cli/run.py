"""`kvtide run`: its options, parsed and checked."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtide.cli.files import check_writable
from kvtide.cli.prompts import LARGEST_NEW_TOKENS, LARGEST_SEED, check_temperature
from kvtide.cli.serving import LibraryServing, check_schedule
from kvtide.cli.session import RunSettings, execute
from kvtide.errors import UsageError
from kvtide.sizes import parse_size


class OnPressure(str, Enum):
    """What happens to the KV of a request that is retracted."""

    offload = "offload"
    recompute = "recompute"


class DType(str, Enum):
    """The dtypes of weights and KV."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def _option(text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, **settings)


# The options whose defaults are said in words.
_KVMemory = Annotated[str | None, _option("KV pool, such as 24MiB.", show_default="room for all")]
_HostMemory = Annotated[
    str | None, _option("For retracted KV.", show_default="a quarter of what is free")
]
_Schedule = Annotated[
    str | None,
    _option("When it works: lazy, eager, random:SEED, thread.", show_default="lazy"),
]
_Threads = Annotated[
    int | None, _option("Compute threads.", min=1, max=1024, show_default="torch's")
]


def run(
    ctx: typer.Context,
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="A file of prompts (JSONL), or - for stdin.")
    ],
    model: Annotated[
        str, _option("A folder, a GGUF file, a hub id, smollm2 or tiny-random.")
    ] = "smollm2",
    kv_memory: _KVMemory = None,
    host_memory: _HostMemory = None,
    on_pressure: Annotated[OnPressure, _option("Fate of retracted KV.")] = OnPressure.offload,
    max_new_tokens: Annotated[
        int, _option("Longest answer, in tokens.", min=1, max=LARGEST_NEW_TOKENS)
    ] = 64,
    temperature: Annotated[float, _option("0 is greedy.")] = 0.0,
    top_k: Annotated[int, _option("0 is every token.", min=0)] = 0,
    top_p: Annotated[float, _option("Above 0, at most 1.")] = 1.0,
    seed: Annotated[int, _option("Seed of each request's sampling.", min=0)] = 0,
    dtype: Annotated[DType, _option("Dtype of weights and KV.")] = DType.bfloat16,
    device: Annotated[str, _option("Where the model and the pool are.")] = "cpu",
    simulate: Annotated[bool, _option("Simulate that device.", "--simulate")] = False,
    schedule: _Schedule = None,
    page_size: Annotated[int, _option("Tokens a page.", min=1, max=4096)] = 16,
    chunk_tokens: Annotated[int, _option("Prompt tokens a step and request.", min=1)] = 256,
    threads: _Threads = None,
    exact: Annotated[
        bool, _option("Answers independent of the batch, or speed.", "--exact/--fast")
    ] = True,
    verify: Annotated[
        bool, _option("Compare with a run in a pool that holds all.", "--verify")
    ] = False,
    out: Annotated[Path | None, _option("Write answers here, one JSON line each.")] = None,
    report: Annotated[Path | None, _option("Write one JSON object of counts here.")] = None,
) -> None:
    """Answer a file of prompts in little KV memory; every answer is exact."""
    from kvtide.serve.options import EngineOptions
    from kvtide.serve.request import SamplingParams

    engine = EngineOptions(
        kv_memory_bytes=_parse_size(kv_memory, "--kv-memory", least=1),
        host_memory_bytes=_parse_size(host_memory, "--host-memory", least=0),
        on_pressure=on_pressure.value,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        threads=threads,
        exact=exact,
        device=device,
        keep_logits=verify,
    )
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=check_temperature(temperature, name="--temperature"),
        top_k=top_k,
        top_p=_check_top_p(top_p),
        seed=_check_seed(seed),
    )
    settings = RunSettings(
        source=prompts,
        model=model,
        dtype=dtype.value,
        sampling=sampling,
        engine=engine,
        schedule=check_schedule(schedule, simulate=simulate),
        verify=verify,
        out=out,
        report=report,
    )
    _check_files(settings)
    raise typer.Exit(execute(settings, ctx.obj or LibraryServing()))


def _parse_size(text: str | None, option: str, *, least: int) -> int | None:
    if text is None:
        return None
    size = parse_size(text, name=option)
    if size < least:
        raise UsageError(f"{option}: {text} is too small; give a size of one page or more")
    return size


def _check_top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(f"--top-p is {value}; it must be above 0 and at most 1")
    return value


def _check_seed(value: int) -> int:
    if value > LARGEST_SEED:
        raise UsageError(f"--seed is {value}; it must be from 0 to {LARGEST_SEED}")
    return value


def _check_files(settings: RunSettings) -> None:
    """Raises UsageError for files that can't be written or that would overwrite each other."""
    written = {"--out": settings.out, "--report": settings.report}
    # Not Path.resolve, which raises RuntimeError for links in a circle.
    seen = {os.path.realpath(settings.source): "PROMPTS"} if settings.source != "-" else {}
    for option, path in written.items():
        if path is None:
            continue
        check_writable(path, option=option)
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option and (not path.exists() or path.is_file()):
            raise UsageError(f"{option}: {path} is also {other}; give another name")
