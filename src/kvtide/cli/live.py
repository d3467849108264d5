"""Shows progress on a terminal: lines that stay, and bars below them that are drawn again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from kvtide.cli.display import Display, Event, printable
from kvtide.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request

_REDRAW_S = 0.1
_LARGEST_BAR, _SMALLEST_BAR = 30, 4
_GAP = 2
_ERASE_BELOW = "\x1b[J"


class LiveArea:
    """The last lines of a terminal, which are drawn again and again in their place.

    rich's own Live erases as many rows as it has drawn. But a terminal that becomes narrower breaks
    long rows in two, and then some of them would stay for ever. So this class counts the rows that
    its lines take in the terminal's width of now.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []
        """The width of each line that is drawn."""
        self._hides_cursor = False

    def draw(self, content: RenderableType) -> None:
        """Shows `content` in place of what was drawn. No thread redraws it."""
        options = self._console.options
        lines = [_trimmed(line) for line in self._console.render_lines(content, options, pad=False)]
        # A row that has left the screen at its top can't be erased.
        lines = lines[: max(1, self._console.height - 1)]
        with self._console:  # which writes all of it at once
            self.erase()
            if not self._hides_cursor:
                self._hides_cursor = self._console.show_cursor(False)
            for line in lines[:-1]:
                self._console.print(Segments([*line, Segment.line()]), end="", soft_wrap=True)
            self._console.print(Segments(lines[-1]), end="", soft_wrap=True)
            # Where the cursor is behind a full row, terminals disagree.
            self._console.control(Control(ControlType.CARRIAGE_RETURN))
        self._widths = [Segment.get_line_length(line) for line in lines]

    def erase(self) -> None:
        """Erases what was drawn; the cursor is then where it was before."""
        if not self._widths:
            return
        width = max(1, self._console.width)
        # The cursor is in the first row of the last line.
        rows = sum(max(1, -(-line_width // width)) for line_width in self._widths[:-1])
        back = Control(ControlType.CARRIAGE_RETURN, *[(ControlType.CURSOR_UP, rows)] * (rows > 0))
        back.segment = back.segment._replace(text=f"{back.segment.text}{_ERASE_BELOW}")
        self._console.control(back)
        self._widths = []

    def close(self) -> None:
        """Erases, and shows the cursor again. May be called at any time."""
        with self._console:
            self.erase()
            if self._hides_cursor:
                self._console.show_cursor(True)
        self._hides_cursor = False


def _trimmed(line: list[Segment]) -> list[Segment]:
    """Without spaces at the end, as terminals differ in whether these are broken in two."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], *(Segment(end.text.rstrip(), end.style) for end in line[-1:])]


@dataclass(frozen=True)
class Bars:
    """Rows of (name, done, total, text), each with a bar if its total is known; then lines."""

    rows: Sequence[tuple[str, int, int | None, str]]
    lines: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(name) for name, *_ in self.rows)
        texts = max(len(text) for *_, text in self.rows)
        free = options.max_width - names - texts - 2 * _GAP
        grid = Table.grid(padding=(0, _GAP))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        for name, done, total, text in self.rows:
            width = max(_SMALLEST_BAR, min(_LARGEST_BAR, free))
            # rich can't draw a bar whose total is 0.
            bar = ProgressBar(total=max(total or 0, 1), completed=done, width=width)
            grid.add_row(name, "" if total is None else bar, text)
        yield grid
        for line in self.lines:
            yield Text(line, no_wrap=True, overflow="ellipsis")


class LiveDisplay(Display):
    """Prints the same lines, with bars below them that are drawn again after each step."""

    def __init__(self, console: Console, **settings: Any) -> None:
        super().__init__(console, **settings)
        self._area = LiveArea(console)
        self._bars: Bars | None = None

    def say(self, line: str, *, event: Event = "note", cut: bool = False, **facts: Any) -> None:
        """See Display."""
        with self._console:  # which writes all of it at once
            self._area.erase()
            super().say(line, event=event, cut=cut, **facts)
            self._redraw()

    def load(self, what: str, done: int, total: int | None) -> None:
        """See Display."""
        if self._is_due(what, _REDRAW_S) or done == total:
            size = f"{format_size(done)} of {format_size(total)}" if total else ""
            name = printable(what if total else f"{what} …", self._console.encoding)
            self._bars = Bars([(name, done, total or None, size)])
            self._area.draw(self._bars)

    def start(self, title: str, requests: Sequence[Request]) -> None:
        """See Display."""
        self.stop()
        super().start(title, requests)

    def conclude(self, rows: Sequence[tuple[str, str]], report: Mapping[str, Any]) -> None:
        """See Display."""
        self.stop()
        super().conclude(rows, report)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See Display."""
        if sys.stdout is None or not sys.stdout.isatty():
            yield
            return
        self._area.erase()
        yield
        self._redraw()

    def stop(self) -> None:
        """See Display."""
        self._bars = None
        self._area.close()

    def _redraw(self) -> None:
        if self._bars is not None:
            self._area.draw(self._bars)

    def _show(self, stats: EngineStats, now: float, has_printed: bool) -> None:
        if has_printed or self._bars is None or now - self._shown_at >= _REDRAW_S:
            self._shown_at = now
            self._bars = self._bars_of(stats)
            self._area.draw(self._bars)

    def _bars_of(self, stats: EngineStats) -> Bars:
        progress = self._progress
        used, size = stats.pool_tokens_used, stats.pool_tokens
        host, limit = stats.host_bytes, stats.host_limit_bytes
        done, total = progress.done, progress.total
        return Bars(
            [
                (progress.title, done, total, f"{done:,} of {total:,} done"),
                ("KV pool", used, size, f"{used:,} of {size:,} tokens"),
                ("host memory", host, limit, f"{format_size(host)} of {format_size(limit)}"),
            ],
            [
                f"{stats.running:,} running, {stats.waiting:,} waiting, "
                f"{stats.retracted:,} retracted",
                f"{progress.times}, {progress.rate.per_second:,.1f} tokens a second",
            ],
        )
