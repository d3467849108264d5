"""Answers as OpenAI's API shapes them: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

from kvtide.prompts.openai_answers import (
    chat_body,
    chat_logprobs,
    completion_body,
    completion_logprobs,
    usage_of,
)
from kvtide.serve.request import Request
from kvtide.server.calls import Progressed
from kvtide.server.intake import Asked
from kvtide.server.tools import CallRules, read_ruled, with_ids

DONE = b"data: [DONE]\n\n"


@final
class Reply:
    """Makes the answer to a call, of requests as far as they are."""

    def __init__(self, asked: Asked, model: str) -> None:
        """`model` is the name of the model that answers."""
        is_chat = asked.is_chat
        self._asked = asked
        self._head = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        self._parts = [
            _StreamedChoice(request, index, asked) for index, request in enumerate(asked.requests)
        ]

    def whole(self, resumed_tokens: int) -> dict[str, Any]:
        """The answer when all requests have ended. `resumed_tokens` are as in Call."""
        asked = self._asked
        if asked.is_chat:
            body = chat_body(asked.requests)
            for choice in body["choices"] if asked.reads_calls else ():
                _set_calls(choice, asked.rules)
        else:
            body = completion_body(asked.requests, asked.sample_count)
            for choice, begin in zip(body["choices"], asked.begins, strict=True):
                choice["text"] = begin + choice["text"]
        return {**self._head, **body, "usage": self._usage(resumed_tokens)}

    def chunks(self, progress: Sequence[Progressed]) -> Iterator[bytes]:
        """The events for what is new since the last call, in server-sent form."""
        for part, now in zip(self._parts, progress, strict=True):
            for choice in part.choices(now):
                yield self._event([choice])

    def last_chunks(self, resumed_tokens: int) -> Iterator[bytes]:
        """The events at the end of a stream."""
        if self._asked.wants_usage:
            yield self._event([], self._usage(resumed_tokens))
        yield DONE

    def _event(self, choices: Sequence[dict[str, Any]], usage: Any = None) -> bytes:
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices}
        if self._asked.wants_usage:
            body["usage"] = usage
        return sse_event(body)

    def _usage(self, resumed_tokens: int) -> dict[str, Any]:
        requests = self._asked.requests
        firsts = requests[:: self._asked.sample_count]
        cached = sum(request.cached_tokens for request in firsts)
        return {
            **usage_of(requests, self._asked.sample_count),
            "prompt_tokens_details": {"cached_tokens": cached},
            "kvtide": {
                "retractions": sum(request.retractions for request in requests),
                "resumed_tokens": resumed_tokens,
            },
        }


@final
class _StreamedChoice:
    """One answer of a stream: what of it was sent, and what is new."""

    def __init__(self, request: Request, index: int, asked: Asked) -> None:
        self._request = request
        self._index = index
        self._begin = asked.begins[index]
        self._is_chat = asked.is_chat
        self._reads_calls = asked.reads_calls
        self._rules = asked.rules
        self._calls: list[dict[str, Any]] = []
        self._stops = [word for word in request.params.stop if word]
        self._visible_characters = self._sent_characters = self._sent_tokens = 0
        self._has_begun = self._has_ended = False

    def choices(self, now: Progressed) -> Iterator[dict[str, Any]]:
        """The choices of the chunks to send, none or more."""
        if self._has_ended:
            return
        if self._is_chat and not self._has_begun:
            self._has_begun = True
            yield self._choice({"role": "assistant", "content": ""}, None, None)
        text, calls = self._new_text(now)
        logprobs, self._has_ended = self._new_logprobs(now), now.has_ended
        if not self._is_chat and (text or logprobs or now.has_ended):
            yield self._choice(text, logprobs, now.finish_reason)
        elif self._is_chat:
            if text or logprobs:
                yield self._choice({"content": text}, logprobs, None)
            if calls:
                yield self._choice({"tool_calls": calls}, None, None)
            if now.has_ended:
                reason = _reason(now.finish_reason, has_calls=bool(self._calls))
                yield self._choice({}, None, reason)

    def _choice(self, content: Any, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta" if self._is_chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _new_text(self, now: Progressed) -> tuple[str, list[dict[str, Any]]]:
        """The new text, and the new calls of tools."""
        text, calls = now.text, self._calls
        if not now.has_ended:
            self._visible_characters = visible_length(text, self._stops, self._visible_characters)
            text = text[: self._visible_characters]
        text = self._begin + text
        first_call = len(calls)
        if self._reads_calls:
            called = read_ruled(text, self._rules, has_ended=now.has_ended)
            text = called.content
            with_ids(called.calls, calls)
        new = text[self._sent_characters :]
        self._sent_characters = max(self._sent_characters, len(text))
        new_calls = [{"index": n, **calls[n]} for n in range(first_call, len(calls))]
        return new, new_calls

    def _new_logprobs(self, now: Progressed) -> dict[str, Any] | None:
        first, self._sent_tokens = self._sent_tokens, now.token_count
        if self._request.params.logprobs is None or first == now.token_count:
            return None
        steps = self._request.logprobs[first : now.token_count]
        if self._is_chat:
            return chat_logprobs(steps)
        begin = sum(len(step.chosen.text) for step in self._request.logprobs[:first])
        return completion_logprobs(steps, begin)


def _set_calls(choice: dict[str, Any], rules: CallRules) -> None:
    """Takes the calls of tools out of the text of a whole answer."""
    message, calls = choice["message"], list[dict[str, Any]]()
    called = read_ruled(rules.begin + message["content"], rules, has_ended=True)
    with_ids(called.calls, calls)
    if calls:
        message |= {"content": called.content or None, "tool_calls": calls}
        choice["finish_reason"] = _reason(choice["finish_reason"], has_calls=True)


def _reason(finish_reason: str | None, *, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def visible_length(text: str, stops: Sequence[str], since: int = 0) -> int:
    """How much of a growing text can't become a part of a stop string any more.

    `since` is what it was before the text grew: a step looks at what is new alone.
    """
    longest = max((len(word) for word in stops), default=1) - 1
    for begin in range(max(since, len(text) - longest), len(text)):
        if any(word.startswith(text[begin:]) for word in stops):
            return begin
    return len(text)


def sse_event(body: object) -> bytes:
    """A server-sent event of JSON, in ASCII."""
    return f"data: {json.dumps(body, allow_nan=False, separators=(',', ':'))}\n\n".encode()
