"""Makes the requests that answer a prompt: one for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.prompts import Prompt

if TYPE_CHECKING:
    from kvtide.serve.request import Request, SamplingParams


def requests_of(
    prompt: Prompt, prompt_ids: Sequence[int], params: SamplingParams, sample_count: int
) -> list[Request]:
    """The requests for a prompt of the tokens `prompt_ids`.

    `params` and `sample_count` are the run's; what the prompt's line says wins. Each request gets
    a seed of its own.
    """
    from kvtide.serve.request import Request
    from kvtide.serve.seeds import derived_seed, sample_seed

    said = replace(params, **prompt.settings)
    requests = []
    for sample, request_id in enumerate(prompt.sample_ids(sample_count)):
        if "seed" in prompt.settings:
            seed = sample_seed(said.seed, sample)
        else:
            seed = derived_seed(said.seed, prompt.place, sample)
        requests.append(Request(request_id, list(prompt_ids), replace(said, seed=seed)))
    return requests
