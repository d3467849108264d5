"""Answers as OpenAI's API reference shapes them: the chat completion and the completion object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.serve.request import Request, StepLogprobs, TokenLogprob

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def chat_body(requests: Sequence[Request]) -> dict[str, Any]:
    """A chat completion of requests that have ended, but for its id, time and model."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": request.text, "refusal": None},
            "logprobs": _if_wanted(request, chat_logprobs),
            "finish_reason": request.finish_reason,
        }
        for index, request in enumerate(requests)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": usage_of(requests)}


def completion_body(requests: Sequence[Request], sample_count: int | None = None) -> dict[str, Any]:
    """A completion of requests that have ended, but for its id, time and model.

    `sample_count` is as in `usage_of`.
    """
    choices = [
        {
            "index": index,
            "text": request.text,
            "logprobs": _if_wanted(request, completion_logprobs),
            "finish_reason": request.finish_reason,
        }
        for index, request in enumerate(requests)
    ]
    usage = usage_of(requests, sample_count)
    return {"object": "text_completion", "choices": choices, "usage": usage}


def usage_of(requests: Sequence[Request], sample_count: int | None = None) -> dict[str, int]:
    """How many tokens a call took; a prompt counts once, however many answers it has.

    Each prompt has `sample_count` answers, which stand side by side; None for one prompt.
    """
    firsts = requests[:: sample_count or len(requests)]
    prompt_count = sum(len(request.prompt_ids) for request in firsts)
    new_count = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": new_count,
        "total_tokens": prompt_count + new_count,
    }


def _if_wanted(
    request: Request, shape: Callable[[Sequence[StepLogprobs]], dict[str, Any]]
) -> dict[str, Any] | None:
    return None if request.params.logprobs is None else shape(request.logprobs)


def chat_logprobs(steps: Sequence[StepLogprobs]) -> dict[str, Any]:
    """The log-probabilities of some steps of a chat completion."""
    content = [
        {**_token(step.chosen), "top_logprobs": [_token(token) for token in step.likeliest]}
        for step in steps
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    # A token that is a part of a character has no text to tell its bytes from.
    data = None if _REPLACEMENT in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def completion_logprobs(steps: Sequence[StepLogprobs], begin: int = 0) -> dict[str, Any]:
    """The log-probabilities of some steps of a completion, from character `begin` of it on."""
    chosen = [step.chosen for step in steps]
    ends = accumulate((len(token.text) for token in chosen), initial=begin)
    return {
        "tokens": [token.text for token in chosen],
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": [_by_text(step) for step in steps],
        "text_offset": list(ends)[: len(chosen)],
    }


def _by_text(step: StepLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for token in step.likeliest:
        found.setdefault(token.text, token.logprob)
    return found
