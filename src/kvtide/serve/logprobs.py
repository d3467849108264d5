"""Log-probabilities: of the chosen token and of the likeliest ones, from a step's logits.

They are those of the model itself: of its logits in float32, before temperature, `top_k` and
`top_p` change them. Each comes from the logits of its own request alone, so it is as exact as they
are: in exact mode the same whatever else is computed, and after a retraction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from tokenizers import Tokenizer

from kvtide.serve.request import StepLogprobs, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which isn't a number of JSON. OpenAI's API has the same."""


def step_logprobs(
    logits: torch.Tensor, token_id: int, count: int, text_of: Callable[[int], str]
) -> StepLogprobs:
    """The log-probabilities of a step: of `token_id`, and of the `count` likeliest tokens.

    `logits` [vocab] may have any float dtype, on any device; `text_of` gives a token's text. Raises
    ArithmeticError if the logits give no probabilities.
    """
    scores = torch.log_softmax(logits.detach().to("cpu", torch.float32), dim=-1)
    if scores.isnan().any():
        raise ArithmeticError("the model's logits give no probabilities (NaN or infinite)")

    def entry(number: int) -> TokenLogprob:
        return TokenLogprob(number, text_of(number), max(float(scores[number]), LEAST_LOGPROB))

    return StepLogprobs(entry(token_id), tuple(entry(n) for n in _likeliest(scores, count)))


def _likeliest(scores: torch.Tensor, count: int) -> list[int]:
    """The ids of the `count` largest `scores` [vocab]; of equal ones the smaller id comes first."""
    count = min(count, len(scores))
    if count == 0:
        return []
    # torch.topk takes any of the equal ones. In bfloat16 many logits are equal.
    least = scores.topk(count).values[-1]
    ids = (scores >= least).nonzero()[:, 0]
    order = scores[ids].argsort(descending=True, stable=True)[:count]
    found: list[int] = ids[order].tolist()
    return found


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function that gives the text of a token within an answer, its leading space included.

    The text of a part of a character is a replacement character.
    """

    @functools.cache
    def text_of(token_id: int) -> str:
        # Some decoders drop the space before the first token, so this is the second of two.
        single: str = tokenizer.decode([token_id], skip_special_tokens=False)
        double: str = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return double[len(single) :]

    return text_of
