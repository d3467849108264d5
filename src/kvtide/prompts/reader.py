"""Reads a file of prompts, one a line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from kvtide.errors import UsageError
from kvtide.prompts.fields import parse_object, quote, refuse
from kvtide.prompts.lines import parse_prompt, parse_text_line
from kvtide.prompts.openai import is_batch_line, parse_batch_line
from kvtide.prompts.prompt import Prompt


def read_prompts(source: str, *, input_format: str = "auto", sample_count: int = 1) -> list[Prompt]:
    """Reads all prompts from the file `source`, or from standard input if it is `-`.

    `input_format` is `jsonl` (kvtide's own lines), `openai` (batch lines), `text` (a prompt a line)
    or `auto`, see `_find_format`. `sample_count` is the number of answers to each prompt that
    doesn't say it. Blank lines are skipped. Raises UsageError for the first error, with the file
    and the line.
    """
    name = "standard input" if source == "-" else source
    prompts: list[Prompt] = []
    taken: dict[str, tuple[Prompt, int]] = {}
    for number, raw in enumerate(_read_bytes(source).split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        if input_format == "auto":
            input_format = _find_format(raw, where, is_text=source.lower().endswith(".txt"))
        if input_format == "text":
            prompt = parse_text_line(raw, where=where, number=number)
        elif input_format == "openai":
            prompt = parse_batch_line(raw, where=where)
        else:
            prompt = parse_prompt(raw, where=where)
        for request_id in prompt.sample_ids(sample_count):
            if request_id in taken:
                _refuse_taken(prompt, request_id, *taken[request_id])
            taken[request_id] = prompt, number
        prompts.append(replace(prompt, place=len(prompts)))
    if not prompts:
        raise UsageError(f'{name} has no prompts; write one {{"id": ..., "prompt": ...}} a line')
    return prompts


def _find_format(first: bytes, where: str, *, is_text: bool) -> str:
    """The format of a file whose first line is `first`; `is_text` for a file called `….txt`.

    Nothing is guessed. Only a file called so is plain text, and only if it doesn't look like JSON:
    of any other file, a damaged first line would make prompts of lines that are none.
    """
    looks_like_json = first.lstrip().startswith((b"{", b"["))
    if is_text and looks_like_json:
        refuse(where, "looks like JSON, but the file is called .txt: say which with --input-format")
    if is_text:
        return "text"
    if not looks_like_json:
        refuse(
            where,
            "is not a JSON object {...}; if the file has a plain prompt in each line, say so with "
            "--input-format text",
        )
    return "openai" if is_batch_line(parse_object(first, where)) else "jsonl"


def _refuse_taken(prompt: Prompt, request_id: str, other: Prompt, line: int) -> NoReturn:
    if prompt.id == other.id:
        refuse(prompt.where, f"id {quote(prompt.id)} was used in line {line}")
    refuse(
        prompt.where,
        f"ids {quote(prompt.id)} and {quote(other.id)} (line {line}) would both have an answer "
        f"called {quote(request_id)}; choose another id",
    )


def _read_bytes(source: str) -> bytes:
    if source == "-" and sys.stdin is None:
        raise UsageError("cannot read prompts from -: standard input is closed; name a file")
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except (OSError, ValueError) as error:
        # ValueError: the path has a NUL byte.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read prompts from {source}: {reason}") from error
    return raw.removeprefix(b"\xef\xbb\xbf")
