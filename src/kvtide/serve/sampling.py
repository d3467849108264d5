"""Sampling: chooses a request's next token from its logits and its random generator."""

from __future__ import annotations

from typing import final

import torch

from kvtide.errors import SnapshotMiss
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

    @property
    def state(self) -> bytes | None:
        """The state of the random generator; None if nothing is drawn."""
        return None if self._warp is None else self._generator.get_state().numpy().tobytes()

    def set_state(self, state: bytes | None) -> None:
        """Sets what `state` gave. Raises SnapshotMiss for anything else."""
        expected = self.state
        if state is None or expected is None or len(state) != len(expected):
            raise SnapshotMiss("the state of a random generator has another length")
        try:
            self._generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
        except RuntimeError as error:
            raise SnapshotMiss("the state of a random generator is invalid") from error

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
