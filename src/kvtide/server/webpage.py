"""The page: one text with its style, its script and, for a recording, the events in it.

The files are in `page/`, and nothing is built of them: they are put into index.html as they are. A
content security policy lets nothing else run, and nothing come from another host.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, final

from kvtide.server.events import Event

_SCRIPTS = ("player.js", "draw.js", "talk.js", "main.js")


@final
@dataclass(frozen=True, slots=True)
class WebPage:
    """The text of a page, and the value of its header `Content-Security-Policy`."""

    text: str
    policy: str


@cache
def live_page() -> WebPage:
    """The page of a server: it reads `/events`, and sends prompts to `/v1/chat/completions`."""
    return _assembled("null", connect="'self'")


def recorded_page(title: str, events: Sequence[Event]) -> str:
    """A page that needs no server, nor any other file: it shows these events, the first one whole.

    It says of itself that it is of `title`.
    """
    return _assembled(_embedded({"title": title, "events": events}), connect="'none'").text


def _assembled(record: str, *, connect: str) -> WebPage:
    style = _read("page.css")
    script = '"use strict";\n' + "\n".join(_read(name) for name in _SCRIPTS)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of(script)}",
            f"style-src {_hash_of(style)}",
            f"connect-src {connect}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    text = _read("index.html")
    for name, part in (("policy", policy), ("style", style), ("script", script)):
        text = text.replace(f"{{{name}}}", part, 1)
    # Browsers ignore this one in a page, and say so.
    return WebPage(text.replace("{record}", record, 1), f"{policy}; frame-ancestors 'none'")


def _embedded(value: Any) -> str:
    """JSON that ends no element of a page, whatever texts it has."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read(name: str) -> str:
    return (files("kvtide.server") / "page" / name).read_text("utf-8")
