"""Answers a file of prompts within the given KV memory, verifies the answers, and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvtide.cli.answering import run_requests
from kvtide.cli.answers import Answers, Kept, open_answers
from kvtide.cli.answers.keys import Conditions
from kvtide.cli.console import make_console
from kvtide.cli.display import Display, Event
from kvtide.cli.displays import make_display
from kvtide.cli.interrupt import Ended, Interrupt
from kvtide.cli.outcome import Answered, Outcome, Work
from kvtide.cli.recording import Recording, write_page
from kvtide.cli.report import describe_check, make_report, summarize, write_report
from kvtide.cli.rows import answer_row
from kvtide.cli.serving import Serving
from kvtide.cli.verify import KeptLine, Verdict, compare_runs, reference_options, reference_requests
from kvtide.errors import KvtideError
from kvtide.prompts import Prompt, read_prompts, single_prompt
from kvtide.sizes import counted

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine
    from kvtide.serve.models import OpenModel
    from kvtide.serve.options import EngineOptions
    from kvtide.serve.request import Request, SamplingParams
    from kvtide.serve.selfcheck import RowCheck

EXIT_OK = 0
EXIT_DIFFERS = 3
EXIT_ALL_FAILED = 4


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
    html: Path | None = None
    """Where the page goes that shows the run."""
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


def execute(settings: RunSettings, serving: Serving) -> int:
    """Answers, verifies and reports; returns the exit code. Raises UsageError for bad input."""
    with Interrupt() as interrupt:
        try:
            return _execute(settings, serving, interrupt)
        except Ended as ended:
            return ended.exit_code


def _execute(settings: RunSettings, serving: Serving, interrupt: Interrupt) -> int:
    if settings.prompt is None:
        prompts = read_prompts(
            settings.source,
            input_format=settings.input_format,
            sample_count=settings.sample_count,
        )
    else:
        prompts = [single_prompt(settings.prompt)]
    as_json = settings.log_format == "json"
    console = make_console()
    out = open_answers(settings.out, resume=settings.resume, overwrite=settings.overwrite)
    with (
        closing(out) as answers,
        make_display(console, quiet=settings.quiet, as_json=as_json) as display,
    ):
        model = _open_model(settings, serving, display)
        session = _Session(settings, serving, display, interrupt, model, answers)
        shares_terminal = answers.is_terminal and console.is_terminal
        answered = session.answer(prompts, echo=not shares_terminal)
        if not answered.is_complete:
            _end_early(settings, answered, answers, display)
        if settings.verify:
            # Write the report now: verifying may run out of memory or be interrupted.
            _report(settings, answered, None)
        can_verify = settings.verify and answered.counts.answered > 0
        verdict = session.verify(answered) if can_verify else None
        _conclude(settings, answered, verdict, answers.place(), display)
    if not answered.counts.answered:
        return EXIT_ALL_FAILED
    return EXIT_OK if verdict is None or verdict.verified else EXIT_DIFFERS


def _open_model(settings: RunSettings, serving: Serving, display: Display) -> OpenModel:
    """Looks for the model and the store first: a name is soon mistyped, and torch takes seconds."""
    found = serving.find_model(settings.model, progress=display.load)
    if settings.engine.mooncake is not None:
        serving.check_mooncake(settings.engine.mooncake)
    display.load("loading torch", 0, None)
    serving.check_device(settings.engine.device, schedule=settings.schedule)
    display.load(f"loading {settings.model}", 0, None)
    return serving.open_model(found, dtype=settings.dtype, progress=display.load)


class _Session:
    """Answers the prompts with one model, and verifies the answers."""

    def __init__(
        self,
        settings: RunSettings,
        serving: Serving,
        display: Display,
        interrupt: Interrupt,
        model: OpenModel,
        answers: Answers,
    ) -> None:
        self._settings = settings
        self._serving = serving
        self._display = display
        self._interrupt = interrupt
        self._model = model
        self._answers = answers
        self._written: set[str] = set()

    def answer(self, prompts: Sequence[Prompt], *, echo: bool) -> Answered:
        """Answers the prompts that have no answer yet. `echo` shows each answer.

        What ends that early, an error of the engine too, is in the outcome: the answers so far
        are written.
        """
        conditions = self._conditions()
        works = [self._work(prompt, conditions) for prompt in prompts]
        keys = {work.prompt.id: work.key for work in works}
        kept = self._answers.keep(keys, conditions.header())
        if self._settings.resume:
            line = _describe_kept(kept, len(prompts))
            self._display.say(line, event="kept", kept=len(kept.lines), prompts=len(prompts))
        left = [work for work in works if work.prompt.id not in kept.lines]
        requests = [request for work in left for request in work.requests]
        engine = self._build_engine(self._settings.engine, requests) if requests else None
        # A signal only sets a flag until the answers are in place; otherwise it would lose them.
        with self._interrupt.gently():
            outcome = Outcome.nothing()
            if engine is not None:
                with closing(engine):
                    self._answers.begin()
                    outcome = self._fill(engine, left, echo=echo)
            outcome = self._complete(outcome, works, left)
        outcome = replace(outcome, ended_by=self._interrupt.requested)
        return Answered(works, kept, self._written, outcome)

    def verify(self, answered: Answered) -> Verdict:
        """Answers again, without retractions, all that was answered, and compares.

        Of answers of earlier runs the lines are compared.
        """
        requests = [request for request in answered.outcome.requests if request.error is None]
        others = reference_requests(requests)
        earlier = [work for work in answered.works if work.prompt.id in answered.kept.lines]
        everything = others + [request for work in earlier for request in work.requests]
        options = reference_options(self._settings.engine)
        engine = self._build_engine(options, everything, answered.outcome.exact_check)
        with self._interrupt.gently(), closing(engine):
            end = self._drive(engine, everything, "verifying", echo=False, on_step=lambda _: None)
        self._interrupt.check()
        if end.error is not None:
            raise end.error
        kept = [
            KeptLine(
                work.prompt.id,
                json.loads(answered.kept.lines[work.prompt.id]),
                answer_row(work.prompt, work.requests, model=self._settings.model),
            )
            for work in earlier
        ]
        return compare_runs(requests, others, kept)

    def _fill(self, engine: Engine, left: Sequence[Work], *, echo: bool) -> Outcome:
        """Answers, and writes each line as its prompt ends."""
        if engine.exact_check is not None:
            self._display.say(describe_check(engine.exact_check), event="exact_mode")
        work_of = {request: work for work in left for request in work.requests}
        recording = None if self._settings.html is None else Recording(engine)

        def write(finished: Sequence[Request]) -> None:
            for request in finished:
                work = work_of[request]
                # Several samples of a prompt may have ended in the same step.
                if work.has_ended and work.prompt.id not in self._written:
                    self._write(work)
            self._answers.sync_if_due()
            if recording is not None:
                recording.note()

        outcome = self._drive(engine, [*work_of], "answering", echo=echo, on_step=write)
        return outcome if recording is None else replace(outcome, events=recording.end())

    def _write(self, work: Work) -> None:
        row = answer_row(work.prompt, work.requests, model=self._settings.model)
        with self._display.aside():
            self._answers.write(work.prompt.id, row, None if work.has_failed else work.key)
        self._written.add(work.prompt.id)

    def _complete(self, outcome: Outcome, works: Sequence[Work], left: Sequence[Work]) -> Outcome:
        """Puts complete answers in their place; if that fails, it is the outcome's error."""
        try:
            self._answers.sync()
            if outcome.error is None and all(work.has_ended for work in left):
                self._answers.finish([work.prompt.id for work in works])
        except KvtideError as error:
            return replace(outcome, error=outcome.error or error)
        return outcome

    def _drive(
        self,
        engine: Engine,
        requests: Sequence[Request],
        title: str,
        *,
        echo: bool,
        on_step: Callable[[Sequence[Request]], None],
    ) -> Outcome:
        try:
            self._display.start(title, requests)
            return run_requests(
                engine, requests, self._display, self._interrupt, echo=echo, on_step=on_step
            )
        finally:
            self._display.stop()

    def _build_engine(
        self, options: EngineOptions, requests: Sequence[Request], check: RowCheck | None = None
    ) -> Engine:
        self._display.load("making the pool and the engine", 0, None)
        return self._serving.build_engine(self._model, options, requests, check)

    def _conditions(self) -> Conditions:
        engine = self._settings.engine
        return Conditions(
            model=self._settings.model,
            model_hash=self._serving.hash_model(self._model),
            settings={
                "dtype": self._settings.dtype,
                "exact": engine.exact,
                "device": engine.device.partition(":")[0],
                "simulated": self._settings.schedule is not None,
                "chunk_tokens": engine.chunk_tokens,
            },
            sampling=self._settings.sampling,
        )

    def _work(self, prompt: Prompt, conditions: Conditions) -> Work:
        requests = self._make_requests(prompt)
        form = "openai" if prompt.is_openai else "plain"
        key = conditions.key(requests, form)
        for request in requests:
            request.key = key
        return Work(prompt, requests, key)

    def _make_requests(self, prompt: Prompt) -> list[Request]:
        settings = self._settings
        return self._serving.make_requests(
            self._model,
            prompt,
            settings.sampling,
            sample_count=settings.sample_count,
            special_tokens=settings.special_tokens,
        )


def _end_early(
    settings: RunSettings, answered: Answered, answers: Answers, display: Display
) -> NoReturn:
    """Says what is kept, writes the report, and raises what ended the run."""
    display.stop()
    counts, place = answered.counts, answers.place()
    failed = f" ({counts.failed:,} failed)" if counts.failed else ""
    outcome = answered.outcome
    under_way = counted(outcome.suspended, "request")
    kept = f"; the KV of {under_way} is in {_places(settings)}" if outcome.suspended else ""
    display.say(
        f"answered: {counts.answered:,} of {counted(counts.prompts, 'prompt')}{failed}"
        f"{', ' if place else ''}{place}{kept}",
        event="ended_early",
        answered=counts.answered,
        prompts=counts.prompts,
        failed=counts.failed,
        suspended=outcome.suspended,
    )
    try:
        _report(settings, answered, None)
    except KvtideError as error:
        if outcome.error is None:
            raise
        display.say(str(error), event="error")
    if outcome.error is not None:
        raise outcome.error
    assert outcome.ended_by is not None
    raise Ended(outcome.ended_by)


def _places(settings: RunSettings) -> str:
    """Where KV is after the run: on the disk, in the store, or in both."""
    engine = settings.engine
    places = [] if engine.disk_dir is None else [str(engine.disk_dir)]
    if engine.mooncake is not None:
        places.append(f"the store of {engine.mooncake.master}")
    return " and ".join(places)


def _describe_kept(kept: Kept, prompt_count: int) -> str:
    notes = [
        (kept.changed, "of other prompts or settings, computed again"),
        (kept.broken, "damaged, computed again"),
        (kept.others, "of ids that no prompt has, left in the file"),
    ]
    said = "".join(f"; {counted(count, 'answer')} {what}" for count, what in notes if count)
    return f"answered already: {len(kept.lines):,} of {counted(prompt_count, 'prompt')}{said}"


def _conclude(
    settings: RunSettings,
    answered: Answered,
    verdict: Verdict | None,
    place: str,
    display: Display,
) -> None:
    """Writes the report, and shows the table and the verdict."""
    report = _report(settings, answered, verdict)
    rows = summarize(answered.outcome.requests, report)
    display.conclude([*rows, ("answers", place)] if place else rows, report)
    if verdict is not None:
        event: Event = "verified" if verdict.verified else "differs"
        display.say(f"verified: {verdict}", event=event, reason=verdict.reason)
    elif settings.verify:
        reason = "no prompt was answered"
        display.say(f"verified: null ({reason})", event="verified", reason=reason)


def _report(
    settings: RunSettings, answered: Answered, verdict: Verdict | None
) -> dict[str, object]:
    """Makes the report; writes it if there is a `--report`, and the page of an `--html`."""
    report = make_report(
        answered.counts,
        answered.outcome,
        exact=settings.engine.exact
        and all(request.exact for work in answered.left for request in work.requests),
        verified=None if verdict is None else verdict.verified,
    )
    if settings.report is not None:
        write_report(settings.report, report)
    if settings.html is not None and verdict is None:  # which comes when the page is there
        write_page(settings.html, settings.model, answered.outcome)
    return report
