"""Parses a line of OpenAI's batch format, as its API reference describes it.

A line is `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. A
field of the body that changes the answer is obeyed or refused; it is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtide.errors import shortened
from kvtide.prompts.fields import (
    check_bool,
    check_list,
    check_object,
    check_text,
    parse_object,
    quote,
    refuse,
    refuse_unknown_keys,
)
from kvtide.prompts.lines import message_of
from kvtide.prompts.messages import check_messages, check_tools
from kvtide.prompts.prompt import Message, Prompt
from kvtide.prompts.settings import (
    COMMON,
    LOGPROBS,
    NEW_TOKENS,
    read_sample_count,
    read_settings,
)

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_CHAT_SETTINGS = {**COMMON, "max_completion_tokens": ("max_new_tokens", NEW_TOKENS)}
_TEXT_SETTINGS = {**COMMON, "logprobs": ("logprobs", LOGPROBS)}
_CHAT_KEYS = ("messages", "tools", "n", "logprobs", "top_logprobs", *_CHAT_SETTINGS)
_TEXT_KEYS = ("prompt", "n", *_TEXT_SETTINGS)
# They don't change the answer. `model` is a name at OpenAI; --model is what answers here.
_HARMLESS = (
    "metadata",
    "model",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# They would change it, and only these values ask for what kvtide does anyway.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto",),
}
_REFUSED = (
    "audio",
    "function_call",
    "functions",
    "prediction",
    "reasoning_effort",
    "stream_options",
    "verbosity",
    "web_search_options",
)

BODY_KEYS = tuple(sorted({*_CHAT_KEYS, *_TEXT_KEYS, *_HARMLESS, *_NEUTRAL}))
"""The keys of a body that may have a value."""


def is_batch_line(fields: Mapping[str, object]) -> bool:
    """Whether a JSON object has the keys of OpenAI's batch format, which kvtide's lines lack."""
    return "custom_id" in fields or "body" in fields


def parse_batch_line(raw: bytes, *, where: str) -> Prompt:
    """Parses one line. Raises UsageError, whose message begins with `where`."""
    fields = parse_object(raw, where)
    refuse_unknown_keys(fields, ("custom_id", "method", "url", "body"), where)
    for key in ("custom_id", "url", "body"):
        if key not in fields:
            refuse(where, f"lacks a '{key}', which each line of OpenAI's batch format has")
    if fields.get("method", "POST") != "POST":
        refuse(where, "'method' isn't \"POST\"")
    url = check_text(fields["url"], "url", where)
    if url not in (CHAT_URL, TEXT_URL):
        refuse(where, f"'url' is {quote(url)}; known are {CHAT_URL}, {TEXT_URL}")
    body = check_object(fields["body"], "body", where)
    is_chat = url == CHAT_URL
    _check_keys(body, _CHAT_KEYS if is_chat else _TEXT_KEYS, where)
    prompt_id = check_text(fields["custom_id"], "custom_id", where)
    if is_chat:
        return _chat(prompt_id, body, where)
    return Prompt(
        where=where,
        id=prompt_id,
        messages=_text(body, where),
        is_chat=False,
        is_openai=True,
        settings=read_settings(body, _TEXT_SETTINGS, where, prefix="body."),
        sample_count=read_sample_count(body, where, prefix="body."),
    )


def _chat(prompt_id: str, body: Mapping[str, Any], where: str) -> Prompt:
    if "messages" not in body:
        refuse(where, "body lacks 'messages'")
    tools = body.get("tools") or ()
    settings = read_settings(body, _CHAT_SETTINGS, where, prefix="body.")
    return Prompt(
        where=where,
        id=prompt_id,
        messages=check_messages(body["messages"], where, prefix="body."),
        is_chat=True,
        is_openai=True,
        tools=check_tools(tools, where, prefix="body.") if tools else (),
        settings=settings | _chat_logprobs(body, where),
        sample_count=read_sample_count(body, where, prefix="body."),
    )


def _chat_logprobs(body: Mapping[str, object], where: str) -> dict[str, int | None]:
    """`logprobs` says whether they are wanted, `top_logprobs` of how many likeliest tokens."""
    top = body.get("top_logprobs")
    count = 0 if top is None else LOGPROBS(top, "body.top_logprobs", where)
    wanted = body.get("logprobs")
    if wanted is not None and check_bool(wanted, "body.logprobs", where):
        return {"logprobs": count}
    if top is not None:
        refuse(where, "has 'body.top_logprobs', which needs 'body.logprobs' to be true")
    return {} if wanted is None else {"logprobs": None}


def _text(body: Mapping[str, object], where: str) -> tuple[Message, ...]:
    value = body.get("prompt")
    if isinstance(value, list):
        prompts = check_list(value, "body.prompt", where)
        if len(prompts) > 1:
            refuse(
                where, f"'body.prompt' has {len(prompts)} entries; write one prompt, as a string"
            )
        value = prompts[0]
    return message_of(check_text(value, "body.prompt", where))


def _check_keys(body: Mapping[str, object], obeyed: tuple[str, ...], where: str) -> None:
    """Refuses what would change the answer and isn't obeyed. Null is as if absent."""
    known = (*obeyed, *_HARMLESS, *_NEUTRAL, *_REFUSED)
    for key, value in body.items():
        if key not in known:
            refuse(where, f"body has an unknown key {quote(key)}; obeyed are {', '.join(obeyed)}")
        if value is None or key in obeyed or key in _HARMLESS:
            continue
        if key in _REFUSED:
            refuse(where, f"'body.{key}' asks for something that kvtide can't do; leave it out")
        if value not in _NEUTRAL[key]:
            shown = shortened(json.dumps(value), 60)
            neutral = " or ".join(json.dumps(other) for other in _NEUTRAL[key])
            refuse(where, f"'body.{key}' is {shown}; kvtide can only do {neutral}")
