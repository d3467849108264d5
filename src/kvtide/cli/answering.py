"""Drives an engine through the requests of all prompts, and says when each has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtide.cli.display import Display
from kvtide.cli.interrupt import Ended, Interrupt
from kvtide.cli.outcome import Outcome
from kvtide.cli.report import describe_cuts

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine
    from kvtide.serve.request import Request


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    display: Display,
    interrupt: Interrupt,
    *,
    echo: bool,
    on_step: Callable[[Sequence[Request]], None],
) -> Outcome:
    """Adds all requests, and steps the engine until all have ended or something ends the run.

    Changes the requests in place, calls `on_step` with those that ended in a step, maybe none, and
    then shows these if `echo`. After a signal the others are suspended and aborted. The caller has
    entered `interrupt`, `gently`, and closes the engine. Raises nothing that the engine or
    `on_step` raises: it is the outcome's error.
    """
    started = time.perf_counter()
    error: Exception | None = None
    is_hasty, suspended = False, 0
    try:
        with interrupt.hasty():
            for request in requests:
                engine.add(request)
        if (line := describe_cuts(engine.stats)) is not None:
            display.say(line)
        while engine.has_work and interrupt.requested is None:
            with interrupt.hasty():
                finished = engine.step()
            on_step(finished)
            display.advance(engine.stats, finished, echo=echo)
    except Ended:
        is_hasty = True  # a second Ctrl-C didn't wait for the step; `requested` tells of it
    except Exception as caught:
        error = caught
    seconds, stats = time.perf_counter() - started, engine.stats
    try:
        with interrupt.hasty():
            suspended = 0 if is_hasty or error is not None else engine.suspend()
    except Ended:
        pass
    except Exception as caught:
        error = caught
    if error is None:
        _abort(engine, requests)
    check, ended_by = engine.exact_check, interrupt.requested
    return Outcome(requests, stats, seconds, check, ended_by, error, suspended)


def _abort(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason is None:
            engine.abort(request.id)
