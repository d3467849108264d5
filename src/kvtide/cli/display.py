"""Shows progress as plain lines, and a table at the end.

All of it goes to standard error, so that standard output has only answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.cli.progress import Progress
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request

STATUS_S = 10.0
Event = Literal[
    "loading",
    "exact_mode",
    "kept",
    "answered",
    "failed",
    "status",
    "ended_early",
    "report",
    "verified",
    "differs",
    "note",
    "warning",
    "stderr",
    "error",
]
"""What can be shown; docs/run.md says what each means."""
LOUD_EVENTS: tuple[Event, ...] = ("warning", "error", "differs")
"""What a quiet display shows too."""
_EXCERPT_CHARACTERS = 200


class Display:
    """Prints plain lines: each answer as it comes, and a status line after a while without answers.

    Lines have the name of an event, by which a quiet display chooses. `clock` gives seconds; it is
    a parameter for the tests.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._clock = clock
        self._title = ""
        self._shown_at = clock()
        self._progress = Progress("", (), self._shown_at)

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def say(self, line: str, *, event: Event = "note", cut: bool = False, **facts: Any) -> None:
        """Shows an event in one line. With `cut`, a terminal gets no more than its width.

        `facts` are what the line says, for programs: EventDisplay shows them.
        """
        del facts
        if not self._is_shown(event):
            return
        text = Text(printable(line, self._console.encoding))
        if cut and self._console.is_terminal:
            self._console.print(text, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(text, soft_wrap=not self._console.is_terminal)

    def load(self, what: str, done: int, total: int | None) -> None:
        """Shows that `done` of `total` bytes of `what` are done; a `total` of None is unknown."""
        if self._is_due(what, STATUS_S) or done == total:
            share = f" of {format_size(total)}" if total else ""
            line = f"{what}: {format_size(done)}{share}" if done or total else what
            self.say(line, event="loading", what=what, done_bytes=done, total_bytes=total)

    def start(self, title: str, requests: Sequence[Request]) -> None:
        """Begins a phase of these requests, such as `answering`."""
        self._title, self._shown_at = title, self._clock()
        self._progress = Progress(title, requests, self._shown_at)

    def advance(self, stats: EngineStats, finished: Sequence[Request], *, echo: bool) -> None:
        """Notes a step of the engine. With `echo`, prints each request that the step finished."""
        now = self._clock()
        self._progress.add(now, stats, finished)
        if echo:
            for request in finished:
                self._show_answer(request)
        self._show(stats, now, bool(finished) and echo)

    def conclude(self, rows: Sequence[tuple[str, str]], report: Mapping[str, Any]) -> None:
        """Shows what the run came to. `rows` say it for people, `report` for programs."""
        del report
        if self._is_shown("report"):
            print_table(self._console, rows)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside this context somebody else may write to the terminal, whole lines alone."""
        yield

    def stop(self) -> None:
        """Ends the phase and removes the live display. May be called at any time."""

    def _is_shown(self, event: Event) -> bool:
        return not self._quiet or event in LOUD_EVENTS

    def _is_due(self, what: str, pause_s: float) -> bool:
        """Whether `what` is new, or was shown long ago; notes that it is shown now."""
        now = self._clock()
        is_due = what != self._title or now - self._shown_at >= pause_s
        if is_due:
            self._title, self._shown_at = what, now
        return is_due

    def _show_answer(self, request: Request) -> None:
        line = describe(request)
        if request.error is not None:
            self.say(line, event="failed", id=request.id, error=request.error)
        else:
            self.say(
                line,
                event="answered",
                cut=True,
                id=request.id,
                new_tokens=len(request.output_ids),
                finish_reason=request.finish_reason,
                retractions=request.retractions,
            )

    def _show(self, stats: EngineStats, now: float, has_printed: bool) -> None:
        if has_printed:
            self._shown_at = now
        elif now - self._shown_at >= STATUS_S:
            self._shown_at = now
            self._show_status(stats)

    def _show_status(self, stats: EngineStats) -> None:
        progress = self._progress
        line = (
            f"{progress.title}: {progress.done:,} of {progress.total:,} done, {progress.times}; "
            f"{stats.running:,} running, {stats.waiting:,} waiting, {stats.retracted:,} retracted; "
            f"pool {stats.pool_tokens_used:,} of {stats.pool_tokens:,} tokens; "
            f"host memory {format_size(stats.host_bytes)}; "
            f"{progress.rate.per_second:,.1f} tokens a second"
        )
        self.say(line, event="status", **status_facts(progress, stats))


def status_facts(progress: Progress, stats: EngineStats) -> dict[str, Any]:
    """What a status line says, for programs."""
    left_s = progress.left_s
    return {
        "phase": progress.title,
        "done": progress.done,
        "total": progress.total,
        "seconds": round(progress.elapsed_s, 1),
        "seconds_left": None if left_s is None else round(left_s, 1),
        "tokens_per_second": round(progress.rate.per_second, 1),
        "running": stats.running,
        "waiting": stats.waiting,
        "retracted": stats.retracted,
        "pool_tokens_used": stats.pool_tokens_used,
        "pool_tokens": stats.pool_tokens,
        "host_bytes": stats.host_bytes,
    }


def describe(request: Request) -> str:
    """One line about a finished request: id, size, finish reason, and the answer's beginning."""
    if request.error is not None:
        return f"{request.id}: failed: {request.error}"
    facts = [counted(len(request.output_ids), "token"), str(request.finish_reason)]
    if request.retractions:
        facts.append(f"retracted {counted(request.retractions, 'time')}")
    excerpt = " ".join(request.text[:_EXCERPT_CHARACTERS].split())
    return f"{request.id}: {', '.join(facts)}: {excerpt}"


def print_table(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Prints the table at the end: aligned on a terminal, `name: value` lines otherwise."""
    if not console.is_terminal:
        for name, value in rows:
            line = printable(f"{name}: {value}", console.encoding)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(printable(value, console.encoding)))
    console.print(table)


def printable(text: str, encoding: str = "utf-8") -> str:
    """`text` on one line. Control characters, and characters not in `encoding`, are replaced."""
    visible = "".join(_visible(character) for character in text)
    return visible.encode(encoding, "replace").decode(encoding)


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"
