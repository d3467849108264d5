"""A fake of the library: its engine answers with token n at step n."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from kvtide.errors import UsageError
from kvtide.prompts import Prompt
from kvtide.prompts.requests import requests_of
from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.engine import Engine, EngineOptions, EngineStats
from kvtide.serve.fetch import Progress
from kvtide.serve.find import FoundModel
from kvtide.serve.models import OpenModel
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.selfcheck import RowCheck
from kvtide.tier import MooncakeSettings

POOL_TOKENS = 64
ROWS = RowCounts((2, 3, 4))
FOUND = RowCheck(ExactRules(ROWS, ROWS), "passes of 2 to 4 rows agree", 0.25)


class FakeEngine:
    """Runs two requests at a time, one token in each step.

    An id decides the fate of its request: `large…` never fits, `moved…` is retracted and resumed
    once, `recomputed…` is recomputed.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.exact_check = FOUND if options.exact else None
        self.counts: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self.before_step: Callable[[], None] = lambda: None
        self.digest_of: Callable[[Request], int] = lambda request: len(request.output_ids) * 31

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return any(request.finish_reason is None for request in self.requests)

    @property
    def stats(self) -> EngineStats:
        """See Engine."""
        return make_stats(pool_tokens=POOL_TOKENS, **self.counts)

    def add(self, request: Request) -> None:
        """See Engine."""
        self.requests.append(request)
        self.counts["prompt_tokens"] += len(request.prompt_ids)

    def step(self) -> list[Request]:
        """See Engine."""
        self.before_step()
        live = [request for request in self.requests if request.finish_reason is None]
        for request in live[:2]:
            self._advance(request)
        return [request for request in live[:2] if request.finish_reason is not None]

    def abort(self, request_id: str) -> None:
        """See Engine."""
        self.aborted.append(request_id)
        for request in self.requests:
            if request.id == request_id:
                request.finish_reason = "abort"

    def suspend(self) -> int:
        """See Engine. There is no disk."""
        return 0

    def close(self) -> None:
        """See Engine."""
        self.is_closed = True

    def _advance(self, request: Request) -> None:
        if request.id.startswith("large") and self.options.kv_memory_bytes is not None:
            request.finish_reason = "error"
            request.error = f"needs 99 tokens of KV, the pool holds {POOL_TOKENS}"
            return
        retracts = self.options.on_pressure != "wait" and not request.output_ids
        if request.id.startswith("moved") and retracts:
            request.retractions += 1
            self.counts["retractions"] += 1
            self.counts["resumes"] += 1
            self.counts["offloaded_bytes"] += 1024
            self.counts["restored_bytes"] += 1024
        if request.id.startswith("recomputed"):
            request.exact = False
            self.counts["recomputed_tokens"] += 1
        request.output_ids.append(len(request.output_ids))
        request.text += f"{request.output_ids[-1]} "
        if self.options.keep_logits:
            request.logit_digests.append(self.digest_of(request))
        self.counts["new_tokens"] += 1
        if len(request.output_ids) == request.params.max_new_tokens:
            request.finish_reason = "length"


class FakeServing:
    """Records its calls, and lets a test change each engine before it runs.

    `on_engine` is called with each engine and its number. `build_error` is raised instead of
    building an engine.
    """

    def __init__(
        self,
        on_engine: Callable[[FakeEngine, int], None] | None = None,
        *,
        build_error: Exception | None = None,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.opened: list[tuple[str, str]] = []
        self.checked: list[tuple[str, str | None]] = []
        self.checks: list[RowCheck | None] = []
        self.joined: list[MooncakeSettings] = []
        self._on_engine = on_engine
        self._build_error = build_error

    def check_device(self, name: str, *, schedule: str | None = None) -> None:
        """See Serving. A simulated device may have any name."""
        self.checked.append((name, schedule))
        if schedule is None and name != "cpu":
            raise UsageError(f"there is no device {name!r}")

    def check_mooncake(self, settings: MooncakeSettings) -> None:
        """See Serving."""
        self.joined.append(settings)

    def find_model(self, name: str, *, progress: Progress) -> FoundModel:
        """See Serving."""
        del progress
        return FoundModel(name, None)

    def open_model(self, found: FoundModel, *, dtype: str, progress: Progress) -> OpenModel:
        """See Serving."""
        progress("loading", 1, 1)
        self.opened.append((found.name, dtype))
        return cast(OpenModel, found.name)

    def hash_model(self, model: OpenModel) -> str:
        """See Serving: equal names are equal models."""
        return f"hash of {model}"

    def make_requests(
        self,
        _model: OpenModel,
        prompt: Prompt,
        params: SamplingParams,
        *,
        sample_count: int = 1,
        special_tokens: bool = False,
    ) -> list[Request]:
        """See Serving."""
        text = "".join(message["content"] for message in prompt.messages)
        return requests_of(prompt, list(text.encode()), params, sample_count)

    def build_engine(
        self,
        _model: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request],
        check: RowCheck | None = None,
    ) -> Engine:
        """See Serving."""
        self.checks.append(check)
        if self._build_error is not None:
            raise self._build_error
        assert requests, "an engine is built for the requests it will get"
        engine = FakeEngine(options)
        if self._on_engine is not None:
            self._on_engine(engine, len(self.engines))
        self.engines.append(engine)
        return cast(Engine, engine)


def press_ctrl_c() -> None:
    """Sends the signal that a terminal sends for Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def make_stats(**values: Any) -> EngineStats:
    """Makes stats with these values; all others are zero."""
    return replace(EngineStats.nothing(), **values)


def make_request(request_id: str = "a", **values: Any) -> Request:
    """Makes a request with a prompt of three tokens and these values."""
    request = Request(id=request_id, prompt_ids=[1, 2, 3], params=SamplingParams())
    for name, value in values.items():
        assert hasattr(request, name), name
        setattr(request, name, value)
    return request
