"""Makes the line that answers a prompt in OpenAI's batch format.

The shapes are those of OpenAI's API reference: the batch output object, the chat completion object
and the completion object. Nothing in a line depends on the time of day or on chance: equal runs
give equal lines, so `created` is 0 and ids are made of the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvtide.prompts import Prompt

if TYPE_CHECKING:
    from kvtide.serve.request import Request, StepLogprobs, TokenLogprob

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def openai_row(prompt: Prompt, requests: Sequence[Request], *, model: str) -> dict[str, Any]:
    """The line for a prompt whose `requests` have all ended.

    Where one of them failed, the line says so and has none of the answers: the format has no place
    for some of them.
    """
    message = next((request.error for request in requests if request.error is not None), None)
    if message is None:
        error = None
        body = _chat(requests) if prompt.is_chat else _completion(requests)
        body = {"id": f"kvtide-{prompt.id}", "created": 0, "model": model, **body}
    else:
        error = {"code": "request_failed", "message": message}
        body = {"error": {"message": message, "type": "invalid_request_error"}}
    return {
        "id": f"kvtide-{prompt.id}",
        "custom_id": prompt.id,
        "response": {
            "status_code": 200 if message is None else 400,
            "request_id": f"kvtide-{prompt.id}",
            "body": body,
        },
        "error": error,
    }


def _chat(requests: Sequence[Request]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": request.text, "refusal": None},
            "logprobs": _chat_logprobs(request),
            "finish_reason": request.finish_reason,
        }
        for index, request in enumerate(requests)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": _usage(requests)}


def _completion(requests: Sequence[Request]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": request.text,
            "logprobs": _completion_logprobs(request),
            "finish_reason": request.finish_reason,
        }
        for index, request in enumerate(requests)
    ]
    return {"object": "text_completion", "choices": choices, "usage": _usage(requests)}


def _usage(requests: Sequence[Request]) -> dict[str, int]:
    """The prompt counts once, however many answers it has."""
    prompt_count = len(requests[0].prompt_ids)
    new_count = sum(len(request.output_ids) for request in requests)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": new_count,
        "total_tokens": prompt_count + new_count,
    }


def _chat_logprobs(request: Request) -> dict[str, Any] | None:
    if request.params.logprobs is None:
        return None
    content = [
        {**_token(step.chosen), "top_logprobs": [_token(token) for token in step.likeliest]}
        for step in request.logprobs
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    # A token that is a part of a character has no text to tell its bytes from.
    data = None if _REPLACEMENT in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def _completion_logprobs(request: Request) -> dict[str, Any] | None:
    if request.params.logprobs is None:
        return None
    chosen = [step.chosen for step in request.logprobs]
    ends = accumulate((len(token.text) for token in chosen), initial=0)
    return {
        "tokens": [token.text for token in chosen],
        "token_logprobs": [token.logprob for token in chosen],
        "top_logprobs": [_by_text(step) for step in request.logprobs],
        "text_offset": list(ends)[: len(chosen)],
    }


def _by_text(step: StepLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for token in step.likeliest:
        found.setdefault(token.text, token.logprob)
    return found
