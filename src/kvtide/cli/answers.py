"""Writes `--out`: one JSON line for each answered request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.cli.files import write_text

if TYPE_CHECKING:
    from kvtide.serve.request import Request


def is_answered(request: Request) -> bool:
    """Whether the request ended with an answer or an error; False if it was aborted."""
    return request.finish_reason not in (None, "abort")


def answer_row(request: Request) -> dict[str, object]:
    """The `--out` line of one request, as a dictionary."""
    return {
        "id": request.id,
        "text": request.text,
        "token_ids": list(request.output_ids),
        "prompt_tokens": len(request.prompt_ids),
        "new_tokens": len(request.output_ids),
        "finish_reason": request.finish_reason,
        "retractions": request.retractions,
        "error": request.error,
    }


def write_answers(path: Path, requests: Iterable[Request]) -> int:
    """Writes a line for each answered request, in the given order; returns their number.

    The file appears complete or not at all. Raises KvtideError if it can't be written.
    """
    rows = [json.dumps(answer_row(r), ensure_ascii=False) for r in requests if is_answered(r)]
    write_text(path, "".join(row + "\n" for row in rows))
    return len(rows)
