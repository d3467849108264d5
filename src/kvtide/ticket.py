"""Ticket: a move that goes on while the caller does other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from kvtide.device import Job
from kvtide.errors import to_keep, to_raise

T = TypeVar("T")


@final
class Ticket(Generic[T]):
    """A move, until its outcome is known.

    Until then the memory at both ends belongs to the move. Only the thread that schedules may call
    these methods.
    """

    def __init__(
        self,
        job: Job[Any],
        *,
        succeed: Callable[[Any], T],
        fail: Callable[[], None] = lambda: None,
        forget: Callable[[Ticket[T]], None] = lambda _: None,
    ) -> None:
        """Called by Tide. `succeed` makes the ticket's result from the job's result. `fail` frees
        what the move holds. `forget` is called once the outcome is known. All are repeatable."""
        self._job = job
        self._succeed = succeed
        self._fail = fail
        self._forget = forget
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Whether the outcome is known. Doesn't ask the device."""
        return bool(self._result) or self._error is not None

    def done(self) -> bool:
        """Whether the move has ended, well or badly. Doesn't block."""
        if not self.settled and self._job.done():
            self.settle()
        return self.settled

    def settle(self) -> None:
        """Blocks until the move has ended. Doesn't raise the move's error; `wait` does."""
        if self.settled:
            return
        try:
            results = self._job.wait()
        except BaseException as error:
            if not self._raises_again(type(error)):
                raise  # a signal handler raised it: the job still runs, so record no outcome
            self._fail()
            self._error = to_keep(error)
        else:
            self._result.append(self._succeed(results))
        self._forget(self)
        del self._succeed, self._fail, self._forget  # frees what these functions hold

    def _raises_again(self, kind: type[BaseException]) -> bool:
        """Whether an error is the job's: the job raises its error at each `wait`."""
        try:
            if self._job.done():
                self._job.wait()
        except kind:
            return True
        return False

    def wait(self) -> T:
        """Blocks until the move has ended; gives its result or raises its error, at each call."""
        self.settle()
        if self._error is not None:
            raise to_raise(self._error)
        return self._result[0]
