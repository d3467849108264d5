"""Parses a line in kvtide's own format, or of plain text.

A line is `{"id": "a", "prompt": "..."}` or `{"id": "b", "messages": [{"role": "user",
"content": "..."}]}`, and may have settings for its request. A line of plain text is a prompt.
"""

from __future__ import annotations

from kvtide.prompts.fields import (
    check_text,
    decode,
    parse_object,
    refuse,
    refuse_unknown_keys,
)
from kvtide.prompts.messages import check_messages, check_tools
from kvtide.prompts.prompt import Prompt
from kvtide.prompts.settings import (
    COMMON,
    LOGPROBS,
    NEW_TOKENS,
    read_sample_count,
    read_settings,
)

_SETTINGS = {
    "max_new_tokens": ("max_new_tokens", NEW_TOKENS),
    **COMMON,
    "logprobs": ("logprobs", LOGPROBS),
}
KEYS = ("id", "prompt", "messages", "tools", *_SETTINGS, "n")


def parse_prompt(raw: bytes, *, where: str) -> Prompt:
    """Parses one line. Raises UsageError, whose message begins with `where`."""
    fields = parse_object(raw, where)
    refuse_unknown_keys(fields, KEYS, where)
    if "id" not in fields:
        refuse(where, "lacks an 'id', a string that no other line has")
    if "prompt" in fields and "messages" in fields:
        refuse(where, "has both 'prompt' and 'messages'; keep one")
    if "prompt" not in fields and "messages" not in fields:
        refuse(where, "lacks a 'prompt' or 'messages'")
    is_chat = "messages" in fields
    if fields.get("tools") and not is_chat:
        refuse(where, "has 'tools', which need 'messages'")
    return Prompt(
        where=where,
        id=check_text(fields["id"], "id", where),
        messages=(
            check_messages(fields["messages"], where)
            if is_chat
            else message_of(check_text(fields["prompt"], "prompt", where))
        ),
        is_chat=is_chat,
        tools=check_tools(fields.get("tools"), where),
        settings=read_settings(fields, _SETTINGS, where),
        sample_count=read_sample_count(fields, where),
    )


def parse_text_line(raw: bytes, *, where: str, number: int) -> Prompt:
    """A line of plain text, without its line break, as a prompt. `number` is the line's."""
    text = check_text(decode(raw.removesuffix(b"\r"), where), "prompt", where)
    return Prompt(where=where, id=f"line-{number}", messages=message_of(text), is_chat=False)


def single_prompt(text: str) -> Prompt:
    """The prompt of `--prompt`, as the only line of a file. Raises UsageError for an empty text."""
    content = check_text(text, "prompt", "--prompt")
    return Prompt(where="--prompt", id="1", messages=message_of(content), is_chat=False)


def message_of(text: str) -> tuple[dict[str, str]]:
    """A conversation of one message of the user."""
    return ({"role": "user", "content": text},)
