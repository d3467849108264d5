"""`kvtide run`: checks its options, and makes the settings of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvtide.cli.answers import holds_answers, part_of
from kvtide.cli.engine_options import engine_options
from kvtide.cli.files import check_writable
from kvtide.cli.options import (
    InputOptions,
    LogOptions,
    MemoryOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    flattened,
)
from kvtide.cli.serving import check_schedule
from kvtide.cli.session import RunSettings, execute
from kvtide.errors import UsageError
from kvtide.prompts import LARGEST_SEED, check_temperature

if TYPE_CHECKING:
    from kvtide.serve.request import SamplingParams


@flattened
def run(
    ctx: typer.Context,
    source: InputOptions,
    model: ModelOptions,
    memory: MemoryOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    log: LogOptions,
) -> None:
    """Answer a file of prompts in little KV memory; every answer is exact."""
    settings = RunSettings(
        source=_check_source(source),
        model=model.model,
        dtype=model.dtype.value,
        sampling=_sampling_params(sampling, output.logprobs),
        engine=engine_options(model, memory, keep_logits=output.verify),
        schedule=check_schedule(model.schedule, simulate=model.simulate),
        verify=output.verify,
        out=None if output.out == Path("-") else output.out,
        report=output.report,
        html=output.html,
        prompt=source.prompt,
        input_format=source.input_format.value,
        special_tokens=source.special_tokens,
        sample_count=sampling.n,
        resume=output.resume,
        overwrite=output.overwrite,
        quiet=log.quiet,
        log_format=log.log_format.value,
    )
    _check_files(settings)
    raise typer.Exit(execute(settings, ctx.obj.serving))


def _check_source(source: InputOptions) -> str:
    """The name of the file of prompts; of standard input where `-p` replaces it."""
    if source.prompts is not None and source.prompt is not None:
        raise UsageError(
            f"PROMPTS is {source.prompts} and --prompt is given too; give the one or the other"
        )
    if source.prompts is None and source.prompt is None:
        raise UsageError(
            "there are no prompts; name a file of them (PROMPTS), - for standard input, "
            "or give one with --prompt"
        )
    return "-" if source.prompts is None else source.prompts


def _sampling_params(sampling: SamplingOptions, logprobs: int | None) -> SamplingParams:
    from kvtide.serve.request import SamplingParams

    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=check_temperature(sampling.temperature, name="--temperature"),
        top_k=sampling.top_k,
        top_p=_check_top_p(sampling.top_p),
        seed=_check_seed(sampling.seed),
        stop=_check_stop(sampling.stop or []),
        logprobs=logprobs,
    )


def _check_top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(f"--top-p is {value}; it must be above 0 and at most 1")
    return value


def _check_seed(value: int) -> int:
    if value > LARGEST_SEED:
        raise UsageError(f"--seed is {value}; it must be from 0 to {LARGEST_SEED}")
    return value


def _check_stop(words: list[str]) -> tuple[str, ...]:
    if "" in words:
        raise UsageError("--stop is empty; an empty text is in every answer")
    return tuple(words)


def _check_files(settings: RunSettings) -> None:
    """Raises UsageError for files that can't be written or that would overwrite each other."""
    seen: dict[str, str] = {}
    if settings.source != "-":
        _claim(seen, "PROMPTS", Path(settings.source))
    if settings.out is not None:
        check_writable(settings.out, option="--out")
        _claim(seen, "--out", settings.out)
        _claim(seen, "the part of --out", part_of(settings.out))
    for option, path in (("--report", settings.report), ("--html", settings.html)):
        if path is not None:
            check_writable(path, option=option)
            _claim(seen, option, path)
            if holds_answers(path):
                raise UsageError(f"{option}: {path} holds answers; give another name")


def _claim(seen: dict[str, str], name: str, path: Path) -> None:
    """Notes that the file `path` is called `name`. Raises UsageError if it is another one, too."""
    # Not Path.resolve, which raises RuntimeError for links in a circle.
    other = seen.setdefault(os.path.realpath(path), name)
    if other != name and (not path.exists() or path.is_file()):
        raise UsageError(f"{name}: {path} is also {other}; give another name")
