"""Parses a line of OpenAI's batch format, as its API reference describes it.

A line is `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. A
field of the body that changes the answer is obeyed or refused; it is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvtide.errors import shortened
from kvtide.prompts.fields import (
    check_bool,
    check_int,
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
from kvtide.prompts.prompt import Prompt
from kvtide.prompts.settings import (
    COMMON,
    LOGPROBS,
    NEW_TOKENS,
    read_sample_count,
    read_settings,
)

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
MOST_PROMPTS = 2048
"""The most prompts of a completion's call."""
_LARGEST_TOKEN = 2**31 - 1
_CHAT_SETTINGS = {**COMMON, "max_completion_tokens": ("max_new_tokens", NEW_TOKENS)}
_TEXT_SETTINGS = {**COMMON, "logprobs": ("logprobs", LOGPROBS)}
_CHAT_KEYS = ("messages", "tools", "n", "logprobs", "top_logprobs", *_CHAT_SETTINGS)
_TEXT_KEYS = ("prompt", "n", *_TEXT_SETTINGS)
# They don't change the answer. `model` is a name at OpenAI; --model is what answers here.
_HARMLESS = (
    "metadata",
    "model",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# They would change it, and only these values ask for what kvtide does anyway.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0.0,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "verbosity": ("medium",),
}
_REFUSED = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "reasoning_effort",
    "stream_options",
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
    prompt_id = check_text(fields["custom_id"], "custom_id", where)
    prompts = read_body(body, prompt_id, where, is_chat=url == CHAT_URL, prefix="body.")
    if len(prompts) > 1:
        said = f"'body.prompt' has {len(prompts)} prompts; write a line for each"
        refuse(where, said, "body.prompt")
    return prompts[0]


def read_body(
    body: Mapping[str, Any],
    prompt_id: str,
    where: str,
    *,
    is_chat: bool,
    prefix: str = "",
    obeyed: tuple[str, ...] = (),
) -> tuple[Prompt, ...]:
    """What the body of a call asks for, of `/v1/chat/completions` if `is_chat`: its prompts.

    A completion may have several, and all have the same settings. `prefix` stands before the names
    of fields in errors. The caller obeys the keys in `obeyed` itself. Raises FieldError, whose
    message begins with `where`.
    """
    place = _Place(where, prefix)
    _check_keys(body, (*(_CHAT_KEYS if is_chat else _TEXT_KEYS), *obeyed), place)
    return (_chat(body, prompt_id, place),) if is_chat else _completions(body, prompt_id, place)


class _Place(NamedTuple):
    """Where a body is, and what stands before the names of its fields."""

    where: str
    prefix: str

    def name(self, key: str) -> str:
        """The name of a field of the body, as errors have it."""
        return f"{self.prefix}{key}"

    @property
    def body(self) -> str:
        """What errors call the body."""
        return self.prefix.removesuffix(".") or "the body"


def _completions(body: Mapping[str, Any], prompt_id: str, place: _Place) -> tuple[Prompt, ...]:
    prompt = Prompt(
        where=place.where,
        id=prompt_id,
        messages=(),
        is_chat=False,
        is_openai=True,
        settings=read_settings(body, _TEXT_SETTINGS, place.where, prefix=place.prefix),
        sample_count=read_sample_count(body, place.where, prefix=place.prefix),
    )
    given = enumerate(_given_prompts(body, place))
    return tuple(replace(prompt, place=number, **fields) for number, fields in given)


def _chat(body: Mapping[str, Any], prompt_id: str, place: _Place) -> Prompt:
    where, prefix = place
    if "messages" not in body:
        refuse(where, f"{place.body} lacks 'messages'", place.name("messages"))
    settings = read_settings(body, _CHAT_SETTINGS, where, prefix=prefix)
    return Prompt(
        where=where,
        id=prompt_id,
        messages=check_messages(body["messages"], where, prefix=prefix),
        is_chat=True,
        is_openai=True,
        field=place.name("messages"),
        tools=check_tools(body.get("tools"), where, prefix=prefix),
        settings=settings | _chat_logprobs(body, place),
        sample_count=read_sample_count(body, where, prefix=prefix),
    )


def _chat_logprobs(body: Mapping[str, object], place: _Place) -> dict[str, int | None]:
    """`logprobs` says whether they are wanted, `top_logprobs` of how many likeliest tokens."""
    name, top = place.name("top_logprobs"), body.get("top_logprobs")
    count = 0 if top is None else LOGPROBS(top, name, place.where)
    wanted = body.get("logprobs")
    if wanted is not None and check_bool(wanted, place.name("logprobs"), place.where):
        return {"logprobs": count}
    if top is not None:
        refuse(
            place.where, f"has '{name}', which needs '{place.name('logprobs')}' to be true", name
        )
    return {} if wanted is None else {"logprobs": None}


def _given_prompts(body: Mapping[str, object], place: _Place) -> list[dict[str, Any]]:
    """The fields of each prompt: a text or a list of tokens; there may be a list of such."""
    name, value = place.name("prompt"), body.get("prompt")
    if not isinstance(value, list) or (value and isinstance(value[0], (int, float))):
        return [_given_prompt(value, name, place.where)]
    prompts = check_list(value, name, place.where)
    if len(prompts) > MOST_PROMPTS:
        said = f"'{name}' has {len(prompts)} prompts; it must have at most {MOST_PROMPTS}"
        refuse(place.where, said, name)
    return [_given_prompt(prompt, f"{name}[{n}]", place.where) for n, prompt in enumerate(prompts)]


def _given_prompt(value: object, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, list):
        return {"field": name, "messages": message_of(check_text(value, name, where))}
    for number, token in enumerate(check_list(value, name, where)):
        if type(token) is not int or not 0 <= token <= _LARGEST_TOKEN:  # quick, for a long list
            check_int(token, f"{name}[{number}]", where, least=0, largest=_LARGEST_TOKEN)
    return {"field": name, "token_ids": tuple(value)}


def _check_keys(body: Mapping[str, object], obeyed: tuple[str, ...], place: _Place) -> None:
    """Refuses what would change the answer and isn't obeyed. Null is as if absent."""
    known = (*obeyed, *_HARMLESS, *_NEUTRAL, *_REFUSED)
    neutral_values = {**_NEUTRAL, "best_of": (body.get("n") or 1,)}  # the best n of n are all
    for key, value in body.items():
        name = place.name(key)
        if key not in known:
            said = f"{place.body} has an unknown key {quote(key)}; obeyed are {', '.join(obeyed)}"
            refuse(place.where, said, name)
        if value is None or key in obeyed or key in _HARMLESS:
            continue
        if key in _REFUSED:
            said = f"'{name}' asks for something that kvtide can't do; leave it out"
            refuse(place.where, said, name)
        if not any(_is_same(value, other) for other in neutral_values[key]):
            shown = shortened(json.dumps(value), 60)
            neutral = " or ".join(json.dumps(other) for other in neutral_values[key])
            refuse(place.where, f"'{name}' is {shown}; kvtide can only do {neutral}", name)


def _is_same(value: object, other: object) -> bool:
    """Whether two values of JSON are the same. In Python true is 1, and 1.0 is, too."""
    is_number = type(value) is int and type(other) is float  # as good as with a point
    return value == other and (type(value) is type(other) or is_number)
