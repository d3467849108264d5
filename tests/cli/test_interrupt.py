from __future__ import annotations

import os
import signal
import threading

import pytest

from kvtide.cli.interrupt import ENDINGS, SIGNALS, Ended, Interrupt


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_says_its_exit_code(number: signal.Signals) -> None:
    """The error is a KeyboardInterrupt, so what cleans up after Ctrl-C cleans up after each."""
    before = signal.getsignal(number)
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt) as ended:
        os.kill(os.getpid(), number)
    assert number == interrupt.requested
    assert isinstance(ended.value, Ended)
    assert 128 + number == ended.value.exit_code
    assert ended.value.exit_code in ENDINGS
    assert before is signal.getsignal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_only_noted_where_that_is_asked_for(number: signal.Signals) -> None:
    """Once and again; the first one counts."""
    with Interrupt() as interrupt:
        with interrupt.gently():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGINT)
        assert number == interrupt.requested
        with pytest.raises(Ended, match=number.name):
            interrupt.check()


def test_only_a_second_ctrl_c_is_hasty() -> None:
    """A supervisor sends TERM, waits, and would send KILL; a person presses again."""
    with Interrupt() as interrupt, interrupt.gently(), interrupt.hasty():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        with pytest.raises(Ended, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_the_process_was_told_to_ignore_stays_ignored(number: signal.Signals) -> None:
    """nohup ignores HUP for what it starts."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), number)
        assert interrupt.requested is None
        assert signal.SIG_IGN is signal.getsignal(number)
    finally:
        signal.signal(number, before)


def test_another_thread_handles_no_signals() -> None:
    """Python doesn't let it; a program that runs the command in a thread has its own way."""
    done: list[bool] = []

    def enter() -> None:
        with Interrupt() as interrupt:
            interrupt.check()
            done.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert [True] == done
