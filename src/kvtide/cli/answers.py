"""Writes `--out`: one JSON line for each answered prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.cli.files import write_text
from kvtide.cli.prompts import Prompt
from kvtide.cli.rows import answer_row

if TYPE_CHECKING:
    from kvtide.serve.request import Request


def is_answered(request: Request) -> bool:
    """Whether the request ended with an answer or an error; False if it was aborted."""
    return request.finish_reason not in (None, "abort")


def write_answers(
    path: Path, answers: Iterable[tuple[Prompt, Sequence[Request]]], *, model: str
) -> int:
    """Writes a line for each prompt whose requests are all answered; returns the lines' number.

    The lines are in the given order. The file appears complete or not at all. Raises KvtideError if
    it can't be written.
    """
    rows = [
        json.dumps(answer_row(prompt, requests, model=model), ensure_ascii=False)
        for prompt, requests in answers
        if all(is_answered(request) for request in requests)
    ]
    write_text(path, "".join(row + "\n" for row in rows))
    return len(rows)
