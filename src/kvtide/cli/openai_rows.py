"""Makes the line that answers a prompt in OpenAI's batch format.

The shape is that of the batch output object in OpenAI's API reference. Nothing in a line depends on
the time of day or on chance: equal runs give equal lines, so `created` is 0 and ids are made of the
prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtide.prompts import Prompt
from kvtide.prompts.openai_answers import chat_body, completion_body

if TYPE_CHECKING:
    from kvtide.serve.request import Request


def openai_row(prompt: Prompt, requests: Sequence[Request], *, model: str) -> dict[str, Any]:
    """The line for a prompt whose `requests` have all ended.

    Where one of them failed, the line says so and has none of the answers: the format has no place
    for some of them.
    """
    message = next((request.error for request in requests if request.error is not None), None)
    if message is None:
        error = None
        body = chat_body(requests) if prompt.is_chat else completion_body(requests)
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
