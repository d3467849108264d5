"""INT (Ctrl-C), TERM and HUP end a run in good order, and its exit code says which it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDINGS = {
    128 + signal.SIGINT: "interrupted",
    128 + signal.SIGTERM: "ended by SIGTERM",
    128 + signal.SIGHUP: "ended by SIGHUP",
}
"""What the exit codes mean, in words."""


class Ended(KeyboardInterrupt):
    """A signal asked for the end. `number` is the signal's."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code as a shell has it: 128 and the signal's number."""
        return 128 + self.number


class Interrupt:
    """Inside this context one of the three signals raises `Ended`.

    Inside `gently()` it only sets `requested`. A signal that the process was started to ignore, as
    by nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._is_gentle = False
        self._is_hasty = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupt:
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `Ended` if a signal has asked for the end."""
        if self.requested is not None:
            raise Ended(self.requested)

    @contextmanager
    def gently(self) -> Iterator[None]:
        """Inside this context a signal only sets `requested`. For what must not be cut off."""
        self._is_gentle = True
        try:
            yield
        finally:
            self._is_gentle = False

    @contextmanager
    def hasty(self) -> Iterator[None]:
        """Inside this context, within `gently()`, a second Ctrl-C raises. For a long step."""
        self._is_hasty = True
        try:
            yield
        finally:
            self._is_hasty = False

    def _request(self, number: int, _frame: FrameType | None) -> None:
        is_second = self.requested is not None
        if not is_second:
            self.requested = signal.Signals(number)
        assert self.requested is not None
        is_impatient = is_second and self._is_hasty and number == signal.SIGINT
        if is_impatient or not self._is_gentle:
            raise Ended(self.requested)
