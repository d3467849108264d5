from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from kvtide.cli.display import Display, describe, print_table, printable
from kvtide.cli.displays import make_display
from kvtide.cli.events import EventDisplay
from kvtide.cli.live import LiveDisplay
from kvtide.serve.request import Request
from support.fake_serving import make_request, make_stats
from support.terminal import Terminal


class _Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _console_of(width: int, *, is_terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=is_terminal,
        color_system=None,
        _environ={"TERM": "xterm"},
    )


def _output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _requests(count: int) -> list[Request]:
    """Requests of at most 64 tokens each."""
    return [make_request(f"r{number}") for number in range(count)]


BUSY = make_stats(
    running=3,
    waiting=12,
    retracted=2,
    pool_tokens=1024,
    pool_tokens_used=1000,
    host_bytes=23_592_960,
    host_limit_bytes=1 << 30,
    new_tokens=50,
)


def test_live_display_fits_80_columns_and_shows_all_figures() -> None:
    """It shows how many requests are in each state, the memory in use, and the token rate."""
    console, clock = _console_of(80, is_terminal=True), _Clock()
    with LiveDisplay(console, clock=clock) as display:
        display.start("answering", _requests(24))
        display.advance(make_stats(pool_tokens=1024, host_limit_bytes=1 << 30), [], echo=True)
        clock.now = 2.0
        display.advance(BUSY, [make_request("a", finish_reason="stop")], echo=True)
        shown = _output_of(console)
    last = shown[shown.rindex("answering") :]
    for figure in (
        "1 of 24 done",
        "3 running, 12 waiting, 2 retracted",
        "0:02 so far, about 0:33 left, 25.0 tokens a second",
        "1,000 of 1,024 tokens",
        "22.5 MiB of 1.0 GiB",
    ):
        assert figure in last
    assert 80 >= max(len(line) for line in last.splitlines())


def test_live_display_is_removed_at_the_end() -> None:
    """After the run the terminal keeps the lines of the answers and shows the cursor again."""
    console = _console_of(80, is_terminal=True)
    with LiveDisplay(console) as display:
        display.start("answering", _requests(1))
        display.advance(BUSY, [], echo=True)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert _output_of(console).count(hide) == _output_of(console).count(show) == 1
    terminal = Terminal(80)
    terminal.write(_output_of(console))
    assert ([], True) == (terminal.lines, terminal.has_cursor)


def _show_steps(display: Display, terminal: Terminal, console: Console, widths: list[int]) -> None:
    """Shows an answer after each change of the terminal's width."""
    display.start("answering", _requests(24))
    for number, width in enumerate(widths):
        terminal.resize(width)
        console.width = width
        ended = make_request(f"r{number}", finish_reason="stop", text="Yes.", output_ids=[1])
        display.advance(BUSY, [], echo=True)
        terminal.resize(width // 2)
        console.width = width // 2
        display.advance(BUSY, [ended], echo=True)


@pytest.mark.parametrize("widths", [[80, 80], [120, 60, 50], [48, 90, 120], [61, 60, 59, 58]])
def test_resized_terminal_keeps_nothing_of_the_old_bars(widths: list[int]) -> None:
    """During the run the screen has the answers and one set of bars, afterwards the answers."""
    terminal = Terminal(widths[0])
    console = Console(
        file=terminal, width=widths[0], force_terminal=True, _environ={"TERM": "xterm"}
    )
    with LiveDisplay(console, clock=_Clock()) as display:
        _show_steps(display, terminal, console, widths)
        screen = terminal.lines
        assert not terminal.has_cursor
    answers = [f"r{number}: 1 token, stop: Yes." for number in range(len(widths))]
    assert len(answers) + 5 == len(screen)
    assert ["a", "K", "h", "3", "0"] == [line[0] for line in screen[-5:]]
    terminal.resize(200)
    assert answers == terminal.lines
    assert terminal.has_cursor


@pytest.mark.parametrize("width", [20, 40, 60, 80, 140])
def test_bars_fit_every_width(width: int) -> None:
    """Bars get shorter so that the figures have room."""
    terminal = Terminal(width)
    console = Console(file=terminal, width=width, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveDisplay(console, clock=_Clock()) as display:
        display.start("answering", _requests(10_000))
        display.advance(BUSY, [], echo=True)
        lines = terminal.lines
    assert 5 == len(lines)
    if width >= 60:
        assert ["0 of 10,000 done", "1,000 of 1,024 tokens", "22.5 MiB of 1.0 GiB"] == [
            line[-end:] for line, end in zip(lines, (16, 21, 19), strict=False)
        ]


def test_bars_are_never_higher_than_the_terminal() -> None:
    """A row that has left the screen at its top can't be erased."""
    terminal = Terminal(60)
    console = Console(
        file=terminal, width=60, height=3, force_terminal=True, _environ={"TERM": "xterm"}
    )
    with LiveDisplay(console, clock=_Clock()) as display:
        display.start("answering", _requests(2))
        display.advance(BUSY, [], echo=True)
        assert ["answering", "KV pool"] == [line[:9].strip() for line in terminal.lines]
    assert [] == terminal.lines


def test_answers_on_the_same_terminal_stand_above_the_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer to standard output removes the bars first, and they come back below the line."""
    terminal = Terminal(60)
    monkeypatch.setattr("sys.stdout", terminal)
    console = Console(file=terminal, width=60, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveDisplay(console, clock=_Clock()) as display:
        display.start("answering", _requests(2))
        display.advance(BUSY, [], echo=False)
        with display.aside():
            terminal.write('{"id": "a"}\n')
        screen = terminal.lines
    assert '{"id": "a"}' == screen[0]
    assert screen[1].startswith("answering")
    assert 6 == len(screen)
    assert ['{"id": "a"}'] == terminal.lines


def test_live_display_leaves_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is written there during the run isn't moved to standard error."""
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    with LiveDisplay(_console_of(80, is_terminal=True)) as display:
        display.start("answering", _requests(1))
        display.advance(BUSY, [], echo=True)
        sys.stdout.write("an answer\n")
    assert "an answer\n" == stdout.getvalue()


def test_quiet_display_shows_errors_alone() -> None:
    """Warnings and errors are shown, but no answers, no status and no table."""
    console, clock = _console_of(80, is_terminal=True), _Clock()
    with make_display(console, quiet=True) as display:
        display.load("fetching", 0, 100)
        display.start("answering", _requests(1))
        clock.now = 100.0
        display.advance(BUSY, [make_request("a", finish_reason="stop")], echo=True)
        display.say("the disk is nearly full", event="warning")
        display.conclude([("exact", "true")], {"exact": True})
    assert "the disk is nearly full\n" == _output_of(console)


def test_events_are_one_object_a_line() -> None:
    """The object has the event's name, the line for people, and the figures."""
    console, clock = _console_of(20, is_terminal=True), _Clock()
    with EventDisplay(console, clock=clock) as display:
        display.load("fetching", 1, 2)
        display.start("answering", _requests(2))
        ended = make_request("a", finish_reason="stop", text="\x1b\n\u732b", output_ids=[1])
        failed = make_request("b", finish_reason="error", error="too long")
        display.advance(BUSY, [ended, failed], echo=True)
        clock.now = 10.0
        display.advance(BUSY, [], echo=True)
        display.conclude([("exact", "true")], {"exact": True})
    lines = [json.loads(line) for line in _output_of(console).splitlines()]
    assert ["loading", "answered", "failed", "status", "report"] == [
        line["event"] for line in lines
    ]
    loading, answered, failure, status, report = lines
    assert ("fetching", 1, 2) == tuple(
        loading[key] for key in ("what", "done_bytes", "total_bytes")
    )
    assert ("a", 1, "stop") == tuple(answered[key] for key in ("id", "new_tokens", "finish_reason"))
    assert ("b", "too long") == (failure["id"], failure["error"])
    assert (2, 2, 10.0, 0.0) == tuple(
        status[key] for key in ("done", "total", "seconds", "seconds_left")
    )
    assert {"event": "report", "exact": True} == report


def test_lines_of_libraries_become_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's warning, which it writes to standard error, doesn't break the stream."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with EventDisplay(Console(stderr=True)) as display:
        print("Setting `pad_token_id`\n\nto 2", end="", file=sys.stderr)  # noqa: T201
        display.say("a note")
        print("the\x1b end", end="", file=sys.stderr)  # noqa: T201
    found = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [
        ("stderr", "Setting `pad_token_id`"),
        ("note", "a note"),
        ("stderr", "to 2the\N{REPLACEMENT CHARACTER} end"),
    ] == [(line["event"], line["message"]) for line in found]
    assert sys.stderr is stderr


def test_events_need_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be started with it closed. The events go nowhere then."""
    monkeypatch.setattr("sys.stderr", None)
    with EventDisplay(Console(stderr=True)) as display:
        display.say("a note")
        assert sys.stderr is None
    assert sys.stderr is None


def test_plain_display_prints_answers_and_now_and_then_a_status() -> None:
    """It writes no control characters, and a status line after ten quiet seconds."""
    console, clock = _console_of(80, is_terminal=False), _Clock()
    with Display(console, clock=clock) as display:
        display.start("answering", _requests(24))
        finished = make_request("a", finish_reason="stop", text="Paris.", output_ids=[1, 2])
        display.advance(make_stats(), [finished], echo=True)
        for second in (1.0, 9.9, 10.0, 11.0):
            clock.now = second
            display.advance(BUSY, [], echo=True)
    assert [
        "a: 2 tokens, stop: Paris.",
        "answering: 1 of 24 done, 0:10 so far, about 2:43 left; "
        "3 running, 12 waiting, 2 retracted; "
        "pool 1,000 of 1,024 tokens; host memory 22.5 MiB; 0.0 tokens a second",
    ] == _output_of(console).splitlines()


def test_loading_is_shown_in_few_plain_lines() -> None:
    """A download that reports often gives one line when it begins and one when it ends."""
    console, clock = _console_of(80, is_terminal=False), _Clock()
    with Display(console, clock=clock) as display:
        for done in range(101):
            display.load("fetching", done << 20, 100 << 20)
        display.load("converting", 0, None)
    assert [
        "fetching: 0 B of 100.0 MiB",
        "fetching: 100.0 MiB of 100.0 MiB",
        "converting",
    ] == _output_of(console).splitlines()


def test_display_is_live_only_where_a_cursor_can_move() -> None:
    """Pipes and dumb terminals get plain lines."""
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert type(make_display(_console_of(80, is_terminal=True))) is LiveDisplay
    assert type(make_display(_console_of(80, is_terminal=False))) is Display
    assert type(make_display(dumb)) is Display
    assert type(make_display(_console_of(80, is_terminal=True), as_json=True)) is EventDisplay


def test_failed_request_is_told_in_full() -> None:
    """Answers are cut to the terminal's width, but the reason of a failure is not."""
    console = _console_of(40, is_terminal=True)
    with LiveDisplay(console) as display:
        display.start("answering", _requests(2))
        reason = "needs 2,000 tokens of KV, and the pool holds 1,024"
        failed = make_request("b", finish_reason="error", error=reason)
        answered = make_request("a", finish_reason="stop", text="word " * 30)
        display.advance(BUSY, [answered, failed], echo=True)
        words = _output_of(console).split()
    assert "holds 1,024" in " ".join(words)
    assert words.count("word") < 10


def test_model_text_cannot_steer_the_terminal() -> None:
    """Escapes and newlines of an answer don't reach the terminal; other scripts do."""
    request = make_request(
        "a", finish_reason="stop", text="\x1b[31mred\r\n猫 [bold]x", output_ids=[1]
    )
    console = _console_of(80, is_terminal=False)
    Display(console).say(describe(request))
    assert "a: 1 token, stop: �[31mred 猫 [bold]x\n" == _output_of(console)
    assert "?" == printable("猫", "latin-1")


def test_table_is_plain_lines_without_a_terminal() -> None:
    """Each row is `name: value`, so that it can be searched, and long values aren't broken."""
    console = _console_of(20, is_terminal=False)
    print_table(console, [("exact", "true"), ("answers", "x" * 50 + "[red]")])
    assert f"exact: true\nanswers: {'x' * 50}[red]\n" == _output_of(console)
