"""Shows progress: live on a terminal, plain lines elsewhere, and a table at the end.

Progress goes to standard error, so that standard output has only results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request

_RATE_WINDOW_S = 5.0
_REDRAW_S = 0.1
_PLAIN_STATUS_S = 10.0
_EXCERPT_CHARACTERS = 200


class Display:
    """Prints plain lines: each answer as it comes, and a status line after a while without answers.

    `clock` gives seconds; it is a parameter for the tests.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._title = ""
        self._total = 0
        self._done = 0
        self._rate = TokenRate()
        self._shown_at = clock()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def say(self, line: str, *, cut: bool = False) -> None:
        """Prints one line. With `cut`, a terminal gets no more than its width."""
        text = Text(printable(line, self._console.encoding))
        if cut and self._console.is_terminal:
            self._console.print(text, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(text, soft_wrap=not self._console.is_terminal)

    def load(self, what: str, done: int, total: int | None) -> None:
        """Shows that `done` of `total` bytes of `what` are done; a `total` of None is unknown."""
        now = self._clock()
        if what != self._title or done == total or now - self._shown_at >= _PLAIN_STATUS_S:
            self._title, self._shown_at = what, now
            share = f" of {format_size(total)}" if total else ""
            self.say(f"{what}: {format_size(done)}{share}" if done or total else what)

    def start(self, title: str, total: int) -> None:
        """Begins a phase of `total` requests, such as `answering`."""
        self._title, self._total, self._done = title, total, 0
        self._rate = TokenRate()
        self._shown_at = self._clock()

    def advance(self, stats: EngineStats, finished: Sequence[Request], *, echo: bool) -> None:
        """Notes a step of the engine. With `echo`, prints each request that the step finished."""
        now = self._clock()
        self._rate.add(now, stats.new_tokens)
        self._done += len(finished)
        if echo:
            for request in finished:
                self.say(describe(request), cut=request.error is None)
        self._show(stats, now, bool(finished) and echo)

    def stop(self) -> None:
        """Ends the phase and removes the live display. May be called at any time."""

    def _show(self, stats: EngineStats, now: float, has_printed: bool) -> None:
        if has_printed:
            self._shown_at = now
        elif now - self._shown_at >= _PLAIN_STATUS_S:
            self._shown_at = now
            self.say(self._status(stats))

    def _status(self, stats: EngineStats) -> str:
        return (
            f"{self._title}: {self._done} of {self._total} done, {stats.running} running, "
            f"{stats.waiting} waiting, {stats.retracted} retracted; "
            f"pool {stats.pool_tokens_used:,} of {stats.pool_tokens:,} tokens; "
            f"host memory {format_size(stats.host_bytes)}; "
            f"{self._rate.per_second:.1f} tokens a second"
        )


class LiveDisplay(Display):
    """Prints the same lines, with bars below them that are drawn again after each step."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._live: Live | None = None

    def load(self, what: str, done: int, total: int | None) -> None:
        """See Display."""
        now = self._clock()
        if what != self._title or done == total or now - self._shown_at >= _REDRAW_S:
            self._title, self._shown_at = what, now
            size = f"{format_size(done)} of {format_size(total)}" if total else ""
            name = printable(what if total else f"{what} …", self._console.encoding)
            row = (name, _bar(done, total), size) if total else (name, "", "")
            self._draw(_grid([row]))

    def start(self, title: str, total: int) -> None:
        """See Display."""
        self.stop()
        super().start(title, total)

    def stop(self) -> None:
        """See Display."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, stats: EngineStats, now: float, has_printed: bool) -> None:
        if has_printed or self._live is None or now - self._shown_at >= _REDRAW_S:
            self._shown_at = now
            self._draw(self._bars(stats))

    def _draw(self, content: RenderableType) -> None:
        if self._live is None:
            # No thread redraws, since the engine's threads need the processor.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(content, refresh=True)

    def _bars(self, stats: EngineStats) -> RenderableType:
        counts = (
            f"{stats.running} running, {stats.waiting} waiting, {stats.retracted} retracted, "
            f"{self._rate.per_second:.1f} tokens a second"
        )
        used, size = stats.pool_tokens_used, stats.pool_tokens
        rows: list[tuple[str, RenderableType, str]] = [
            (self._title, _bar(self._done, self._total), f"{self._done} of {self._total} done"),
            ("KV pool", _bar(used, size), f"{used:,} of {size:,} tokens"),
            (
                "host memory",
                _bar(stats.host_bytes, stats.host_limit_bytes),
                f"{format_size(stats.host_bytes)} of {format_size(stats.host_limit_bytes)}",
            ),
        ]
        return Group(_grid(rows), Text(counts, no_wrap=True, overflow="ellipsis"))


class TokenRate:
    """Tokens per second over the last five seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, token_count: int) -> None:
        """Notes that there were `token_count` tokens in all at the time `now`, in seconds."""
        self._seen.append((now, token_count))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """The rate; 0 until two times are known."""
        if len(self._seen) < 2:
            return 0.0
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        return (after - before) / (end - start) if end > start else 0.0


def make_display(console: Console) -> Display:
    """A live display for a terminal that can move its cursor, otherwise plain lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return Display(console)


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


def _bar(done: int, total: int) -> ProgressBar:
    # rich can't draw a bar whose total is 0.
    return ProgressBar(total=max(total, 1), completed=done, width=30)


def _grid(rows: Sequence[tuple[str, RenderableType, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for name, bar, value in rows:
        table.add_row(name, bar, value)
    return table
