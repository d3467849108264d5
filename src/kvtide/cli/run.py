"""`kvtide run`: answers a file of prompts within the given KV memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvtide.cli.display import Display, make_display, print_table, printable
from kvtide.cli.interrupt import Interrupt
from kvtide.cli.prompts import (
    LARGEST_NEW_TOKENS,
    LARGEST_SEED,
    Prompt,
    check_temperature,
    read_prompts,
)
from kvtide.cli.results import (
    check_writable,
    describe_check,
    is_answered,
    make_report,
    summarize,
    write_answers,
    write_report,
)
from kvtide.cli.serving import LibraryServing, Serving, check_schedule
from kvtide.cli.verify import Verdict, compare_runs
from kvtide.errors import UsageError
from kvtide.sizes import parse_size

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine, EngineStats
    from kvtide.serve.models import OpenModel
    from kvtide.serve.options import EngineOptions
    from kvtide.serve.request import Request, SamplingParams
    from kvtide.serve.selfcheck import RowCheck

EXIT_OK = 0
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


class OnPressure(str, Enum):
    """What happens to the KV of a request that is retracted."""

    offload = "offload"
    recompute = "recompute"


class DType(str, Enum):
    """The dtypes of weights and KV."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(frozen=True)
class RunSettings:
    """The options of `kvtide run`, parsed and checked.

    `source` names the prompts. `sampling` holds for a request unless its prompt says otherwise.
    `engine` is for answering, not for verifying. A `schedule` of None means a real device.
    """

    source: str
    model: str
    dtype: str
    sampling: SamplingParams
    engine: EngineOptions
    schedule: str | None
    verify: bool
    out: Path | None
    report: Path | None


@dataclass(frozen=True)
class Outcome:
    """The result of answering all requests once; `seconds` is its wall time."""

    requests: list[Request]
    stats: EngineStats
    seconds: float
    interrupted: bool
    exact_check: RowCheck | None


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


def execute(settings: RunSettings, serving: Serving) -> int:
    """Answers, verifies and reports; returns the exit code. Raises UsageError for bad input."""
    prompts = read_prompts(settings.source)
    serving.check_device(settings.engine.device, schedule=settings.schedule)
    with make_display(Console(stderr=True)) as display:
        display.load(f"loading {settings.model}", 0, None)
        model = serving.open_model(settings.model, dtype=settings.dtype, progress=display.load)
        session = _Session(settings, serving, display, model)
        outcome = session.answer(prompts)
        if outcome.interrupted:
            display.stop()
            display.say(_describe_interruption(settings, outcome))
            return EXIT_INTERRUPTED
        if settings.verify:
            # Write the report now: verifying may run out of memory or be interrupted.
            _report(settings, outcome, None)
        verdict = session.verify(prompts, outcome) if settings.verify else None
    _conclude(settings, outcome, verdict)
    return EXIT_OK if verdict is None or verdict.verified else EXIT_DIFFERS


def run_requests(
    engine: Engine,
    requests: list[Request],
    display: Display,
    interrupt: Interrupt,
    *,
    echo: bool,
) -> Outcome:
    """Adds all requests and steps the engine until all have ended, or until Ctrl-C.

    Changes the requests in place; after Ctrl-C aborts the unfinished ones. With `echo` shows each
    answer as it comes. The caller has entered `interrupt` and closes the engine.
    """
    started = time.perf_counter()
    with interrupt.hasty():
        for request in requests:
            engine.add(request)
        while engine.has_work and not interrupt.requested:
            finished = engine.step()
            display.advance(engine.stats, finished, echo=echo)
    seconds = time.perf_counter() - started
    stats = engine.stats
    for request in requests:
        if request.finish_reason is None:
            engine.abort(request.id)
    return Outcome(requests, stats, seconds, interrupt.requested, engine.exact_check)


class _Session:
    """Answers the requests with one model, and verifies them."""

    def __init__(
        self, settings: RunSettings, serving: Serving, display: Display, model: OpenModel
    ) -> None:
        self._settings = settings
        self._serving = serving
        self._display = display
        self._model = model

    def answer(self, prompts: Sequence[Prompt]) -> Outcome:
        """Answers the requests and writes the answers; after an error, the answers so far."""
        requests = [self._make_request(prompt) for prompt in prompts]
        engine = self._build_engine(self._settings.engine, requests)
        if engine.exact_check is not None:
            self._display.say(describe_check(engine.exact_check))
        # Ctrl-C only sets a flag until the answers are written; otherwise it would lose them.
        with Interrupt() as interrupt:
            try:
                outcome = self._drive(engine, requests, "answering", interrupt, echo=True)
            finally:
                if self._settings.out is not None:
                    write_answers(self._settings.out, requests)
        return replace(outcome, interrupted=interrupt.requested)

    def verify(self, prompts: Sequence[Prompt], outcome: Outcome) -> Verdict:
        """Answers again, in a pool that holds all requests, all that didn't fail; compares."""
        pairs = [
            (request, self._make_request(prompt))
            for prompt, request in zip(prompts, outcome.requests, strict=True)
            if request.error is None
        ]
        others = [other for _, other in pairs]
        roomy = replace(self._settings.engine, kv_memory_bytes=None)
        engine = self._build_engine(roomy, others, outcome.exact_check)
        with Interrupt() as interrupt:
            again = self._drive(engine, others, "verifying", interrupt, echo=False)
        if interrupt.requested:
            raise KeyboardInterrupt
        return compare_runs([request for request, _ in pairs], again.requests)

    def _drive(
        self,
        engine: Engine,
        requests: list[Request],
        title: str,
        interrupt: Interrupt,
        *,
        echo: bool,
    ) -> Outcome:
        try:
            self._display.start(title, len(requests))
            return run_requests(engine, requests, self._display, interrupt, echo=echo)
        finally:
            engine.close()
            self._display.stop()

    def _build_engine(
        self, options: EngineOptions, requests: Sequence[Request], check: RowCheck | None = None
    ) -> Engine:
        self._display.load("making the pool and the engine", 0, None)
        return self._serving.build_engine(self._model, options, requests, check)

    def _make_request(self, prompt: Prompt) -> Request:
        """The settings in a prompt's line win over the command's options."""
        said: dict[str, Any] = {
            "max_new_tokens": prompt.max_new_tokens,
            "temperature": prompt.temperature,
            "seed": prompt.seed,
        }
        said = {name: value for name, value in said.items() if value is not None}
        return self._serving.make_request(
            self._model, prompt, replace(self._settings.sampling, **said)
        )


def _conclude(settings: RunSettings, outcome: Outcome, verdict: Verdict | None) -> None:
    """Writes the report, and prints the table and the verdict."""
    report = _report(settings, outcome, verdict)
    rows = summarize(outcome.requests, report)
    if settings.out is not None:
        rows.append(("answers", str(settings.out)))
    console = Console()
    print_table(console, rows)
    if verdict is not None:
        line = printable(f"verified: {verdict}", console.encoding)
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _report(settings: RunSettings, outcome: Outcome, verdict: Verdict | None) -> dict[str, object]:
    """Makes the report, and writes it if there is a `--report`."""
    report = make_report(
        outcome.requests,
        outcome.stats,
        seconds=outcome.seconds,
        exact=settings.engine.exact and all(request.exact for request in outcome.requests),
        check=outcome.exact_check,
        verified=None if verdict is None else verdict.verified,
    )
    if settings.report is not None:
        write_report(settings.report, report)
    return report


def _describe_interruption(settings: RunSettings, outcome: Outcome) -> str:
    answered = sum(is_answered(request) for request in outcome.requests)
    kept = f", kept in {settings.out}" if settings.out is not None else ""
    return f"{answered} of {len(outcome.requests)} requests are answered{kept}"


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
