"""EngineLoop: the thread that owns the engine, and what it tells those who wait for answers.

Others never touch the engine. They hand over what shall be done between two steps; after each step
the thread publishes how far each answer is. What it publishes replaces what was there before, so
that a reader who is slow costs nothing but the answer itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar, final

from kvtide.errors import KvtideError
from kvtide.serve.engine import Engine
from kvtide.serve.stats import EngineStats
from kvtide.server.calls import Call, Failure
from kvtide.server.errors import place_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOVING_S = 0.05
"""How often an engine without work looks whether a tier has done what it was told."""
FAILED = "the engine failed while it computed this; try again"
ENDED = "the engine has ended, and the server ends; send this again when it has started anew"
CUT = "the server ended before the answer; send the request again"


@final
@dataclass(frozen=True, slots=True)
class _Order:
    """What the engine's thread shall do between two steps."""

    do: Callable[[], None]
    fail: Callable[[Failure], None]
    """Called if it fails, or if the thread has ended: nobody shall wait for it for ever."""


@final
class EngineLoop:
    """Steps an engine in a thread of its own, while there is work.

    An error costs the calls that it touches, and the thread goes on. If it can't, it ends all
    calls, and refuses later ones.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes the engine over, and closes it in the end."""
        self.stats: EngineStats = engine.stats
        """The engine's counts after its last step."""
        self.failures = 0
        """How often the engine failed: at a step, which ends all requests, or at an order."""
        self.aborted = 0
        """How many requests nobody wanted any more. The engine's stats have them as done."""
        self.has_failed = False
        """Whether the thread ended by an error."""
        self.ended: Future[None] = _future()
        """Is done when the thread has ended."""
        self._engine = engine
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._lock = threading.Lock()
        self._takes_orders = True
        self._calls: dict[str, Call] = {}
        self._observers: list[Callable[[Engine], None]] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="kvtide engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, and does what is asked."""
        return self._takes_orders and self._thread.is_alive()

    def observe(self, observer: Callable[[Engine], None]) -> None:
        """Has `observer` called after each step, in the engine's thread. It must be quick.

        One that raises an error is called no more.
        """
        self._observers.append(observer)

    def submit(self, call: Call) -> None:
        """Hands the requests of a call over. Their first progress says whether they are taken."""
        self._order(lambda: self._add(call), call.fail)

    def abort(self, call: Call) -> None:
        """Ends the requests of a call within one step, and frees all that they hold."""
        call.is_gone = True
        self._order(lambda: self._abort(call), call.fail)

    def ask(self, question: Callable[[Engine], T]) -> Future[T]:
        """What `question` returns, called between two steps, in the engine's thread.

        The future has the error that it raises, and RuntimeError where the thread has ended.
        """
        future: Future[T] = _future()

        def answer() -> None:
            try:
                future.set_result(question(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._order(answer, lambda failure: future.set_exception(RuntimeError(failure.message)))
        return future

    def suspend(self, message: str) -> Future[int]:
        """Leaves requests in tiers, and ends all with an error. Gives how many were left."""
        future: Future[int] = _future()

        def leave() -> None:
            future.set_result(self._leave(message))

        self._order(leave, lambda _: future.set_result(0))
        return future

    def close(self) -> None:
        """Ends the thread after the step that it is in, and closes the engine. Waits for that."""
        if not self._thread.is_alive():
            return

        def end() -> None:
            self._is_ending = True

        self._order(end, lambda _: None)
        self._thread.join()

    def _order(self, do: Callable[[], None], fail: Callable[[Failure], None]) -> None:
        with self._lock:  # so that none comes after the thread has looked for the last time
            if self._takes_orders:
                self._orders.put(_Order(do, fail))
                return
        fail(Failure("ended", ENDED))

    # ---- in the engine's thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._obey()
                if self._engine.has_work and not self._is_ending:
                    self._step()
                else:
                    self.stats = self._engine.stats
                self._tell_observers()
        except Exception as error:
            self.has_failed = True
            logger.error("the engine can't go on, and the server ends: %s", place_of(error))
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        with self._lock:
            self._takes_orders = False
        failure = Failure("ended", ENDED if self.has_failed else CUT)
        while not self._orders.empty():
            self._orders.get().fail(failure)
        self._fail_all(failure)
        try:
            self._engine.close()
        except Exception as error:
            self._note_failure("closing the engine", error)
        self.ended.set_result(None)

    def _tell_observers(self) -> None:
        for observer in list(self._observers):
            try:
                observer(self._engine)
            except Exception as error:
                self._note_failure("an observer, which is told no more,", error)
                self._observers.remove(observer)

    def _note_failure(self, what: str, error: Exception) -> None:
        self.failures += 1
        logger.error("%s failed: %s", what, place_of(error))

    def _obey(self) -> None:
        """Does what was ordered. Without other work it waits for an order."""
        while not self._engine.has_work:
            with suppress(Empty):
                self._do(self._orders.get(timeout=self._longest_pause()))
                break
        while not self._orders.empty():
            self._do(self._orders.get())

    def _do(self, order: _Order) -> None:
        try:
            order.do()
        except Exception as error:
            self._note_failure("an order to the engine", error)
            order.fail(Failure("failed", FAILED))

    def _longest_pause(self) -> float | None:
        """How long the thread may wait for orders: while a tier moves something, not for ever.

        The file of a request that was aborted while it was written is removed after its end.
        """
        spill = self._engine.store.spill
        return _MOVING_S if spill is not None and spill.settle() else None

    def _add(self, call: Call) -> None:
        if call.is_gone:
            return
        for number, request in enumerate(call.requests):
            self._calls[request.id] = call
            try:
                self._engine.add(request)
                refusal = request.error
            except KvtideError as error:
                refusal = str(error)
            except Exception:
                self._end(call)
                raise
            if refusal is not None:
                self._end(call)  # the format has no place for the others
                call.fail(Failure("refused", refusal, number))
                return
        call.begin()

    def _leave(self, message: str) -> int:
        failure = Failure("ended", CUT)
        try:
            left_count = self._engine.suspend()
            failure = Failure("ended", message)
            return left_count
        finally:
            self._fail_all(failure)

    def _abort(self, call: Call) -> None:
        self.aborted += sum(request.id in self._calls for request in call.requests)
        self._end(call)
        call.publish()

    def _end(self, call: Call) -> None:
        for request in call.requests:
            if self._calls.pop(request.id, None) is not None:
                self._free(request.id)

    def _free(self, request_id: str) -> None:
        try:
            self._engine.abort(request_id)
        except Exception as error:
            self._note_failure("the end of a request", error)

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:
            self._note_failure("a step of the engine, with all requests,", error)
            self._give_up()
            return
        self.stats = self._engine.stats  # before anybody hears of an answer that is in it
        stepped = [*self._engine.scheduler.running, *finished]
        calls = dict.fromkeys(self._calls[r.id] for r in stepped if r.id in self._calls)
        for request in finished:
            self._calls.pop(request.id, None)
        for call in calls:
            if call.has_news:
                call.publish()

    def _give_up(self) -> None:
        """Ends all requests after an error of the engine, which may go on without them.

        Raises RuntimeError if it still has some: they would fail at each step.
        """
        for request_id in list(self._calls):
            self._free(request_id)
        self._fail_all(Failure("failed", FAILED))
        if self._engine.has_work:
            raise RuntimeError("the engine kept requests that failed")

    def _fail_all(self, failure: Failure) -> None:
        calls = dict.fromkeys(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.fail(failure)


def _future() -> Future[T]:
    """A future that runs already: who waits for it can't cancel it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
