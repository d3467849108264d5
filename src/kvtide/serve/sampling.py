"""Sampling: the next token of one request, from its logits and its own random numbers."""

from __future__ import annotations

from typing import final

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtide.serve.request import SamplingParams


@final
class Sampler:
    """Chooses a request's tokens; its random generator is the request's alone.

    So neither the other requests of a step nor a retraction change what it draws.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._greedy = params.temperature == 0
        self._generator = torch.Generator().manual_seed(params.seed)
        self._processors = LogitsProcessorList()
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                self._processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._processors.append(TopPLogitsWarper(float(params.top_p)))

    def choose(self, logits: torch.Tensor) -> int:
        """The next token for `logits` [vocab], of any float dtype, on any device."""
        if self._greedy:
            return int(logits.argmax())
        # One request at a time, and in float32: the shape must not depend on the batch.
        scores = logits.detach().to("cpu", torch.float32)[None]
        nothing = torch.empty(1, 0, dtype=torch.int64)
        weights = torch.softmax(self._processors(nothing, scores), dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))
