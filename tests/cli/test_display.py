from __future__ import annotations

import io

from rich.console import Console

from kvtide.cli.display import (
    Display,
    LiveDisplay,
    TokenRate,
    describe,
    make_display,
    print_table,
    printable,
)
from support.fake_serving import make_request, make_stats


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
        display.start("answering", 24)
        display.advance(make_stats(pool_tokens=1024, host_limit_bytes=1 << 30), [], echo=True)
        clock.now = 2.0
        display.advance(BUSY, [make_request("a", finish_reason="stop")], echo=True)
        shown = _output_of(console)
    last = shown[shown.rindex("answering") :]
    for figure in (
        "1 of 24 done",
        "3 running, 12 waiting, 2 retracted, 25.0 tokens a second",
        "1,000 of 1,024 tokens",
        "22.5 MiB of 1.0 GiB",
    ):
        assert figure in last
    assert 80 >= max(len(line) for line in last.splitlines())


def test_live_display_is_removed_at_the_end() -> None:
    """After the run the terminal keeps the lines of the answers and shows the cursor again."""
    console = _console_of(80, is_terminal=True)
    with LiveDisplay(console) as display:
        display.start("answering", 1)
        display.advance(BUSY, [], echo=True)
    hide, show, erase_line = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"
    assert _output_of(console).count(hide) == _output_of(console).count(show) == 1
    assert _output_of(console).rstrip().endswith(erase_line)


def test_plain_display_prints_answers_and_now_and_then_a_status() -> None:
    """It writes no control characters, and a status line after ten quiet seconds."""
    console, clock = _console_of(80, is_terminal=False), _Clock()
    with Display(console, clock=clock) as display:
        display.start("answering", 24)
        finished = make_request("a", finish_reason="stop", text="Paris.", output_ids=[1, 2])
        display.advance(make_stats(), [finished], echo=True)
        for second in (1.0, 9.9, 10.0, 11.0):
            clock.now = second
            display.advance(BUSY, [], echo=True)
    assert [
        "a: 2 tokens, stop: Paris.",
        "answering: 1 of 24 done, 3 running, 12 waiting, 2 retracted; "
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


def test_failed_request_is_told_in_full() -> None:
    """Answers are cut to the terminal's width, but the reason of a failure is not."""
    console = _console_of(40, is_terminal=True)
    with LiveDisplay(console) as display:
        display.start("answering", 2)
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


def test_rate_covers_the_last_five_seconds() -> None:
    """A slow start doesn't lower the rate for the rest of the run."""
    rate = TokenRate()
    assert rate.per_second == 0.0
    for now, tokens in ((0.0, 0), (10.0, 10), (12.0, 50), (14.0, 90)):
        rate.add(now, tokens)
    assert 20.0 == rate.per_second
