"""Lookups: asks a tier over a network which blocks it has, without holding up the scheduler.

A scheduler asks again in each step, and so an answer is kept as long as its request is there. All
that is asked in a step is a single question to the tier, in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import final

from kvtide.errors import KvtideError, first_line
from kvtide.plugin.vllm.timely import TimelyJob, TimelyThreads
from kvtide.tier import Tier

logger = logging.getLogger(__name__)

_Asked = list[tuple[str, bytes, str]]
"""For each block the request that asks, the block's key, and its name in the tier."""


@final
@dataclass(frozen=True, slots=True)
class _Question:
    """What was asked in a step."""

    job: TimelyJob[list[bool]]
    asked: _Asked


@final
class Lookups:
    """The answers of a tier to the requests that are there. One thread calls, the scheduler's.

    A tier that takes too long, or fails, has nothing.
    """

    def __init__(self, tier: Tier, threads: TimelyThreads) -> None:
        self._tier = tier
        self._threads = threads
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        """By request and key; None while nobody knows."""
        self._asked: _Asked = []
        """What has been asked in this step."""
        self._questions: list[_Question] = []
        self._has_looked = False
        """Whether answers were looked for in this step."""

    def ask(self, req_id: str, key: bytes, name: str) -> bool | None:
        """Whether the tier has a block; None if a later step tells."""
        answers = self._answers.setdefault(req_id, {})
        if key not in answers:
            answers[key] = None
            self._asked.append((req_id, key, name))
        elif answers[key] is None and not self._has_looked:
            self._take_answers()
        return answers[key]

    def flush(self) -> None:
        """Asks the tier what was asked in this step, and takes the answers that have come."""
        self._take_answers()
        self._has_looked = False
        asked, self._asked = self._asked, []
        if not asked:
            return
        job = self._threads.start(partial(self._found, [name for _, _, name in asked]))
        if job is None:
            self._note(asked, [False] * len(asked))
        else:
            self._questions.append(_Question(job, asked))

    def wait(self, at_most_s: float) -> None:
        """Blocks until all answers have come, or for so long. The next step takes them."""
        self._threads.wait((question.job for question in self._questions), at_most_s)

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        """The tier didn't give these blocks, whatever it had answered."""
        for key in keys:
            for answers in self._answers.values():
                if key in answers:
                    answers[key] = False

    def forget(self, req_id: str) -> None:
        """The request has ended."""
        self._answers.pop(req_id, None)

    def close(self) -> None:
        """Ends the threads; waits a while for an answer that is late."""
        self._threads.close()

    def _found(self, names: list[str]) -> list[bool]:
        """In a thread."""
        try:
            return self._tier.contains_each(names)
        except KvtideError as error:
            logger.debug("kvtide: a tier couldn't be asked: %s", first_line(error))
        except Exception:
            logger.exception("kvtide: a tier failed")
        return [False] * len(names)

    def _take_answers(self) -> None:
        self._has_looked = True
        going_on = []
        for question in self._questions:
            if question.job.done():
                self._note(question.asked, question.job.wait())
            elif self._threads.has_failed(question.job):
                self._note(question.asked, [False] * len(question.asked))
            else:
                going_on.append(question)
        self._questions = going_on

    def _note(self, asked: _Asked, found: list[bool]) -> None:
        for (req_id, key, _), is_there in zip(asked, found, strict=True):
            answers = self._answers.get(req_id, {})
            # A block may have been marked missing while the answer was on its way.
            if key in answers and answers[key] is None:
                answers[key] = is_there
