"""The lines of an answer file: how they are written, and what of them is read again.

Each line is a JSON object with an `id` (`custom_id` in OpenAI's batch form) and a `key`, which says
what was asked (see `keys.py`); it is null if the prompt failed. A part, which holds the lines while
the run goes on, begins with a header: `{"kvtide": 1, "model": ..., "settings": ...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
HEADER_START = b'{"kvtide":'
# JSON allows these in a text. But programs end lines at some of them, and a terminal obeys others.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029]")


@dataclass
class Saved:
    """What an answer file or a part holds."""

    header: dict[str, Any] | None = None
    answers: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """The lines by id and key. One id may have several keys, if its prompt was changed."""
    broken: list[int] = field(default_factory=list)
    """The numbers of the lines, from 1, that aren't lines of kvtide's."""

    @property
    def ids(self) -> set[str]:
        """The ids that have an answer."""
        return {answer_id for answer_id, _ in self.answers}


def encoded(row: Mapping[str, Any], key: str | None) -> bytes:
    """A line: the row and its key, in UTF-8."""
    text = json.dumps({**row, "key": key}, ensure_ascii=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def header_line(header: Mapping[str, Any]) -> bytes:
    """The first line of a part."""
    line = json.dumps({"kvtide": VERSION, **header}).encode() + b"\n"
    assert line.startswith(HEADER_START)
    return line


def is_ours(header: Mapping[str, Any]) -> bool:
    """Whether a part with this header is of the version that this module reads."""
    version = header["kvtide"]
    return version == VERSION and not isinstance(version, bool)


def read_saved(lines: Iterable[bytes]) -> Saved:
    """Reads what was written, or anything else. A last line without its end doesn't count."""
    saved = Saved()
    for number, line in enumerate(lines, start=1):
        row = _parsed(line)
        if number == 1 and "kvtide" in row:
            saved.header = row
            continue
        answer_id, key = row.get("custom_id", row.get("id")), row.get("key", 0)
        if isinstance(answer_id, str) and isinstance(key, str):
            saved.answers[answer_id, key] = line
        elif not isinstance(answer_id, str) or key is not None:
            saved.broken.append(number)
    return saved


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> str:
    """How two headers differ, in words; empty if they don't, or if there is no other."""
    here, there = _flat(ours), _flat(theirs or {})
    return ", ".join(
        f"{name} is {json.dumps(here[name])} here and {json.dumps(there[name])} there"
        for name in here
        if name in there and here[name] != there[name]
    )


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """The model and the settings, as they are once written and read again."""
    form: dict[str, Any] = json.loads(json.dumps(header))
    settings = form.pop("settings", None)
    return form | (settings if isinstance(settings, dict) else {})


def _parsed(line: bytes) -> dict[str, Any]:
    """The line's object; an empty one for anything else."""
    if not line.endswith(b"\n"):
        return {}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
