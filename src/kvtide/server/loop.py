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


@final
class EngineLoop:
    """Steps an engine in a thread of its own, while there is work."""

    def __init__(self, engine: Engine) -> None:
        """Takes the engine over, and closes it in the end."""
        self.stats: EngineStats = engine.stats
        """The engine's counts after its last step."""
        self.failures = 0
        """How often a step failed, which ends all requests."""
        self.aborted = 0
        """How many requests nobody wanted any more. The engine's stats have them as done."""
        self._engine = engine
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: dict[str, Call] = {}
        self._observers: list[Callable[[Engine], None]] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="kvtide engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def observe(self, observer: Callable[[Engine], None]) -> None:
        """Has `observer` called after each step, in the engine's thread. It must be quick."""
        self._observers.append(observer)

    def submit(self, call: Call) -> None:
        """Hands the requests of a call over. Their first progress says whether they are taken."""
        self._orders.put(lambda: self._add(call))

    def abort(self, call: Call) -> None:
        """Ends the requests of a call within one step, and frees all that they hold."""
        call.is_gone = True
        self._orders.put(lambda: self._abort(call))

    def ask(self, question: Callable[[Engine], T]) -> Future[T]:
        """What `question` returns, called between two steps, in the engine's thread."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._orders.put(answer)
        return future

    def suspend(self, message: str) -> Future[int]:
        """Leaves requests in tiers, and ends all with an error. Gives how many were left."""

        def leave(engine: Engine) -> int:
            left_count = engine.suspend()
            self._fail_all(Failure("ended", message))
            return left_count

        return self.ask(leave)

    def close(self) -> None:
        """Ends the thread after the step that it is in, and closes the engine. Waits for that."""
        if not self._thread.is_alive():
            return

        def end() -> None:
            self._is_ending = True

        self._orders.put(end)
        self._thread.join()

    # ---- in the engine's thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._obey()
                if self._engine.has_work and not self._is_ending:
                    self._step()
                else:
                    self.stats = self._engine.stats
                for observer in self._observers:
                    observer(self._engine)
        finally:
            self._fail_all(Failure("ended", "the server has ended"))
            self._engine.close()

    def _obey(self) -> None:
        """Does what was ordered. Without other work it waits for an order."""
        while not self._engine.has_work:
            with suppress(Empty):
                self._orders.get(timeout=self._longest_pause())()
                break
        while not self._orders.empty():
            self._orders.get()()

    def _longest_pause(self) -> float | None:
        """How long the thread may wait for orders: while a tier moves something, not for ever.

        The file of a request that was aborted while it was written is removed after its end.
        """
        spill = self._engine.store.spill
        return _MOVING_S if spill is not None and spill.settle() else None

    def _add(self, call: Call) -> None:
        if call.is_gone:
            return
        for request in call.requests:
            self._calls[request.id] = call
            try:
                self._engine.add(request)
            except KvtideError as error:
                request.finish_reason, request.error = "error", str(error)
        if any(request.error is not None for request in call.requests):
            self._refuse(call)
        else:
            call.resumed_tokens = sum(len(request.output_ids) for request in call.requests)
            call.publish()

    def _refuse(self, call: Call) -> None:
        """Ends a call of which a request was refused; the format has no place for the others."""
        reason = next(r.error for r in call.requests if r.error is not None)
        self._end(call)
        call.fail(Failure("refused", f"the request can't be answered: {reason}"))

    def _abort(self, call: Call) -> None:
        self.aborted += sum(request.id in self._calls for request in call.requests)
        self._end(call)
        call.publish()

    def _end(self, call: Call) -> None:
        for request in call.requests:
            if self._calls.pop(request.id, None) is not None:
                self._engine.abort(request.id)

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:
            logger.error("a step of the engine failed, and all requests: %s", place_of(error))
            self.failures += 1
            self._give_up()
            return
        self.stats = self._engine.stats  # before anybody hears of an answer that is in it
        changed = dict.fromkeys(self._calls.values())
        for request in finished:
            self._calls.pop(request.id, None)
        for call in changed:
            call.publish()

    def _give_up(self) -> None:
        """Ends all requests after an error of the engine, which may go on without them."""
        for request_id in list(self._calls):
            self._engine.abort(request_id)
        self._fail_all(Failure("failed", FAILED))

    def _fail_all(self, failure: Failure) -> None:
        calls = dict.fromkeys(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.fail(failure)
