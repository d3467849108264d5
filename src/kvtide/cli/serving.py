"""The part of the library that the commands use. It is imported only when a method is called.

torch and transformers take seconds to import. Help and input errors must appear at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvtide.cli.simulated import simulate
from kvtide.errors import UsageError
from kvtide.prompts import Prompt
from kvtide.prompts.requests import make_requests

if TYPE_CHECKING:
    from kvtide.serve.engine import Engine, EngineOptions
    from kvtide.serve.fetch import Progress
    from kvtide.serve.find import FoundModel
    from kvtide.serve.models import OpenModel
    from kvtide.serve.request import Request, SamplingParams
    from kvtide.serve.selfcheck import RowCheck
    from kvtide.tier import MooncakeSettings


class Serving(Protocol):
    """What the commands need of the library. Tests give a small fake."""

    def find_model(self, name: str, *, progress: Progress) -> FoundModel:
        """Finds a model, and fetches it if it isn't here. Raises UsageError if there is none.

        It loads no torch, so the user need not wait for that to be told.
        """

    def check_device(self, name: str, *, schedule: str | None = None) -> None:
        """Raises UsageError if there is no such device. With a `schedule`, simulates it first."""

    def check_mooncake(self, settings: MooncakeSettings) -> None:
        """Raises UsageError if the store's package or its master is missing. Loads no torch."""

    def open_model(self, found: FoundModel, *, dtype: str, progress: Progress) -> OpenModel:
        """Loads weights and tokenizer. Raises UsageError if the model can't be loaded."""

    def hash_model(self, model: OpenModel) -> str:
        """32 hex digits for all of the model that decides an answer."""

    def make_requests(
        self,
        model: OpenModel,
        prompt: Prompt,
        params: SamplingParams,
        *,
        sample_count: int = 1,
        special_tokens: bool = False,
    ) -> list[Request]:
        """The requests for the answers to a prompt, in the order of the answers.

        `params` and `sample_count` are the run's; what the prompt's line says wins. With
        `special_tokens` the text of a special token in a prompt is that token. Requests for a
        prompt whose length alone shows that it can't fit have an `error` and no tokens. Raises
        UsageError if the model can't take the prompt.
        """

    def build_engine(
        self,
        model: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request],
        check: RowCheck | None = None,
    ) -> Engine:
        """Makes an engine, with a pool for all `requests` unless the options limit it.

        `check` is the self-check's result from another engine of this model, if there is one.
        Raises UsageError, for example for a pool of less than one page.
        """


class LibraryServing:
    """The library itself."""

    def find_model(self, name: str, *, progress: Progress) -> FoundModel:
        """See Serving."""
        from kvtide.serve.find import find_model

        return find_model(name, progress=progress)

    def check_device(self, name: str, *, schedule: str | None = None) -> None:
        """See Serving."""
        from kvtide.device import open_device
        from kvtide.serve.repeatable import ask_for_repeatable_results

        ask_for_repeatable_results()  # before anything is computed; a simulated device computes
        if schedule is not None:
            simulate(name, schedule)
        open_device(name).close()

    def check_mooncake(self, settings: MooncakeSettings) -> None:
        """See Serving."""
        from kvtide.tier.mooncake_connect import check_mooncake

        check_mooncake(settings)

    def open_model(self, found: FoundModel, *, dtype: str, progress: Progress) -> OpenModel:
        """See Serving."""
        from kvtide.serve.models import open_model

        return open_model(found, dtype=dtype, progress=progress)

    def hash_model(self, model: OpenModel) -> str:
        """See Serving."""
        return model.identity

    def make_requests(
        self,
        model: OpenModel,
        prompt: Prompt,
        params: SamplingParams,
        *,
        sample_count: int = 1,
        special_tokens: bool = False,
    ) -> list[Request]:
        """See Serving."""
        return make_requests(
            model, prompt, params, sample_count=sample_count, special_tokens=special_tokens
        )

    def build_engine(
        self,
        model: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request],
        check: RowCheck | None = None,
    ) -> Engine:
        """See Serving."""
        from kvtide.serve.engine import Engine

        return Engine.build(model, options, requests, check=check)


def check_schedule(schedule: str | None, *, simulate: bool) -> str | None:
    """The schedule of the simulated device, or None for a real device.

    Raises UsageError for a schedule without `--simulate`.
    """
    if schedule is not None and not simulate:
        raise UsageError("--schedule is for a simulated device; add --simulate")
    return (schedule or "lazy") if simulate else None
