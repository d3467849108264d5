"""Ctrl-C while requests are answered sets a flag: each step ends, and no answer is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupt:
    """Inside this context Ctrl-C sets `requested` and raises nothing.

    Only a second Ctrl-C inside `hasty()` raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_hasty = False

    def __enter__(self) -> Interrupt:
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def hasty(self) -> Iterator[None]:
        """Inside this context a second Ctrl-C raises KeyboardInterrupt. For long work."""
        self._is_hasty = True
        try:
            yield
        finally:
            self._is_hasty = False

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested and self._is_hasty:
            raise KeyboardInterrupt
        self.requested = True
