"""Makes the line that answers a prompt, as a dictionary, in the format that the prompt had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtide.cli.openai_rows import openai_row
from kvtide.prompts import Prompt

if TYPE_CHECKING:
    from kvtide.serve.request import Request, StepLogprobs, TokenLogprob


def answer_row(prompt: Prompt, requests: Sequence[Request], *, model: str) -> dict[str, Any]:
    """The line for a prompt whose `requests` have all ended: one for each sample, in order.

    `model` is the name of the model that answered.
    """
    if prompt.is_openai:
        return openai_row(prompt, requests, model=model)
    if len(requests) == 1:
        return {"id": prompt.id, **_sample(requests[0])}
    return {"id": prompt.id, "samples": [_sample(request) for request in requests]}


def _sample(request: Request) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": request.text,
        "token_ids": list(request.output_ids),
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": request.cached_tokens,
        "new_tokens": len(request.output_ids),
        "finish_reason": request.finish_reason,
        "retractions": request.retractions,
        "error": request.error,
    }
    if request.params.logprobs is not None:
        row["logprobs"] = [_step(step) for step in request.logprobs]
    return row


def _step(step: StepLogprobs) -> dict[str, Any]:
    return {**_token(step.chosen), "likeliest": [_token(token) for token in step.likeliest]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "text": token.text, "logprob": token.logprob}
