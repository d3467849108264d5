from __future__ import annotations

import json
from pathlib import Path

from kvtide.cli.answers import write_answers
from kvtide.cli.prompts import Prompt
from kvtide.serve.request import Request
from support.fake_serving import make_request

ANSWERED = {"output_ids": [5, 6], "text": "hé\n", "finish_reason": "stop", "retractions": 2}


def _asked(*requests: Request) -> tuple[Prompt, list[Request]]:
    """A prompt that these requests answer."""
    return Prompt("f, line 1", requests[0].id, (), is_chat=False), list(requests)


def test_answer_line_has_these_keys_in_this_order(tmp_path: Path) -> None:
    """A line is what other programs read: keys, their order and their values are fixed."""
    count = write_answers(
        tmp_path / "out.jsonl", [_asked(make_request("b", **ANSWERED))], model="m"
    )
    assert count == 1
    assert (
        '{"id": "b", "text": "hé\\n", "token_ids": [5, 6], "prompt_tokens": 3, "new_tokens": 2, '
        '"finish_reason": "stop", "retractions": 2, "error": null}\n'
    ) == (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_only_what_is_answered_or_failed_is_written_in_order(tmp_path: Path) -> None:
    """Requests that never finished or were given up have no line; a failed one has."""
    answers = [
        _asked(make_request("z", finish_reason="length")),
        _asked(make_request("unfinished")),
        _asked(make_request("y", finish_reason="error", error="too large")),
        _asked(make_request("given up", finish_reason="abort")),
        _asked(make_request("half", finish_reason="stop"), make_request("half#1")),
        _asked(make_request("a", finish_reason="stop")),
    ]
    write_answers(tmp_path / "out.jsonl", answers, model="m")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [("z", None), ("y", "too large"), ("a", None)] == [
        (row["id"], row["error"]) for row in map(json.loads, lines)
    ]
