"""Answers a file of prompts within the given KV memory, verifies the answers, and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvtide.cli.answers import is_answered, write_answers
from kvtide.cli.display import Display, Event
from kvtide.cli.displays import make_display
from kvtide.cli.interrupt import Interrupt
from kvtide.cli.prompts import Prompt, read_prompts, single_prompt
from kvtide.cli.report import describe_check, describe_cuts, make_report, summarize, write_report
from kvtide.cli.serving import Serving
from kvtide.cli.verify import Verdict, compare_runs, reference_options, reference_requests

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine, EngineStats
    from kvtide.serve.models import OpenModel
    from kvtide.serve.options import EngineOptions
    from kvtide.serve.request import Request, SamplingParams
    from kvtide.serve.selfcheck import RowCheck

EXIT_OK = 0
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


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
    """None is standard output."""
    report: Path | None
    prompt: str | None = None
    """The only prompt, in place of those in `source`."""
    input_format: str = "auto"
    special_tokens: bool = False
    """Whether the text of a special token in a prompt is that token."""
    sample_count: int = 1
    """How many answers each prompt gets, unless its line says otherwise."""
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    log_format: str = "text"


@dataclass(frozen=True)
class Outcome:
    """The result of answering all requests once; `seconds` is its wall time."""

    requests: list[Request]
    stats: EngineStats
    seconds: float
    interrupted: bool
    exact_check: RowCheck | None


def execute(settings: RunSettings, serving: Serving) -> int:
    """Answers, verifies and reports; returns the exit code. Raises UsageError for bad input."""
    if settings.prompt is None:
        prompts = read_prompts(
            settings.source,
            input_format=settings.input_format,
            sample_count=settings.sample_count,
        )
    else:
        prompts = [single_prompt(settings.prompt)]
    as_json = settings.log_format == "json"
    console = Console(stderr=True)
    with make_display(console, quiet=settings.quiet, as_json=as_json) as display:
        model = _open_model(settings, serving, display)
        session = _Session(settings, serving, display, model)
        outcome = session.answer(prompts)
        if outcome.interrupted:
            display.stop()
            display.say(_describe_interruption(settings, outcome), event="ended_early")
            return EXIT_INTERRUPTED
        if settings.verify:
            # Write the report now: verifying may run out of memory or be interrupted.
            _report(settings, outcome, None)
        verdict = session.verify(outcome) if settings.verify else None
        _conclude(settings, outcome, verdict, display)
    return EXIT_OK if verdict is None or verdict.verified else EXIT_DIFFERS


def _open_model(settings: RunSettings, serving: Serving, display: Display) -> OpenModel:
    """Looks for the model first: to load torch takes seconds, and a name is soon mistyped."""
    found = serving.find_model(settings.model, progress=display.load)
    display.load("loading torch", 0, None)
    serving.check_device(settings.engine.device, schedule=settings.schedule)
    display.load(f"loading {settings.model}", 0, None)
    return serving.open_model(found, dtype=settings.dtype, progress=display.load)


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
        if (line := describe_cuts(engine.stats)) is not None:
            display.say(line)
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
        answers = [(prompt, self._make_requests(prompt)) for prompt in prompts]
        requests = [request for _, samples in answers for request in samples]
        engine = self._build_engine(self._settings.engine, requests)
        if engine.exact_check is not None:
            self._display.say(describe_check(engine.exact_check), event="exact_mode")
        # Ctrl-C only sets a flag until the answers are written; otherwise it would lose them.
        with Interrupt() as interrupt:
            try:
                outcome = self._drive(engine, requests, "answering", interrupt, echo=True)
            finally:
                if self._settings.out is not None:
                    write_answers(self._settings.out, answers, model=self._settings.model)
        return replace(outcome, interrupted=interrupt.requested)

    def verify(self, outcome: Outcome) -> Verdict:
        """Answers again, without retractions, all that didn't fail, and compares."""
        answered = [request for request in outcome.requests if request.error is None]
        others = reference_requests(answered)
        options = reference_options(self._settings.engine)
        engine = self._build_engine(options, others, outcome.exact_check)
        with Interrupt() as interrupt:
            reference = self._drive(engine, others, "verifying", interrupt, echo=False)
        if interrupt.requested:
            raise KeyboardInterrupt
        return compare_runs(answered, reference.requests)

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
            self._display.start(title, requests)
            return run_requests(engine, requests, self._display, interrupt, echo=echo)
        finally:
            engine.close()
            self._display.stop()

    def _build_engine(
        self, options: EngineOptions, requests: Sequence[Request], check: RowCheck | None = None
    ) -> Engine:
        self._display.load("making the pool and the engine", 0, None)
        return self._serving.build_engine(self._model, options, requests, check)

    def _make_requests(self, prompt: Prompt) -> list[Request]:
        settings = self._settings
        return self._serving.make_requests(
            self._model,
            prompt,
            settings.sampling,
            sample_count=settings.sample_count,
            special_tokens=settings.special_tokens,
        )


def _conclude(
    settings: RunSettings, outcome: Outcome, verdict: Verdict | None, display: Display
) -> None:
    """Writes the report, and shows the table and the verdict."""
    report = _report(settings, outcome, verdict)
    rows = summarize(outcome.requests, report)
    if settings.out is not None:
        rows.append(("answers", str(settings.out)))
    display.conclude(rows, report)
    if verdict is not None:
        event: Event = "verified" if verdict.verified else "differs"
        display.say(f"verified: {verdict}", event=event, reason=verdict.reason)


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
