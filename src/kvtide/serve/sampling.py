"""Sampling: chooses a request's next token from its logits and its random generator."""

from __future__ import annotations

from typing import final

import torch

from kvtide.serve.adapter import warper
from kvtide.serve.request import SamplingParams


@final
class Sampler:
    """Chooses a request's tokens, with a random generator that no other request uses.

    So neither other requests nor a retraction change the tokens that are drawn.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._generator = torch.Generator().manual_seed(params.seed)
        is_greedy = params.temperature == 0
        self._warp = None if is_greedy else warper(params.temperature, params.top_k, params.top_p)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token for `logits` [vocab], of any float dtype, on any device.

        Raises ArithmeticError for NaN and, if `temperature` isn't 0, for plus infinity.
        """
        # One request at a time: the shape must not depend on the batch.
        scores = logits.detach().to("cpu", torch.float32)
        if self._warp is None:
            # The first of the largest. torch's argmax takes eight times as long in bfloat16.
            token = int(scores.numpy().argmax())
            if scores[token].isnan():
                raise ArithmeticError("the model's logits are not numbers (NaN)")
            return token
        weights = torch.softmax(self._warp(scores[None]), dim=-1)
        if not weights.isfinite().all():
            raise ArithmeticError("the model's logits give no probabilities (NaN or infinite)")
        return int(torch.multinomial(weights, 1, generator=self._generator))
